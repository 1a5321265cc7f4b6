"""Files that are read, not mapped into memory.

A map of a file that is shortened, or deleted on a file server, ends the process with SIGBUS and without a word.  A read
of such a file comes back short or with an error, which a sentence can tell.  An open file is also the file that was
opened: one that is put in its place later under the same name does not mix with it.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import Any

import numpy as np

from megaponder.errors import UserError

REMEDY = "bring it back as it was and start the same command again"


class CheckedFile:
    """An open file of known size.  Threads may share it: reads have no common position."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._handle = -1
        self._handle = _open(self.path)
        self.status = os.fstat(self._handle)
        """As it was when it was opened."""

    @property
    def size(self) -> int:
        """Bytes when it was opened."""
        return self.status.st_size

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on.  UserError if they cannot be read or are no longer there."""
        try:
            data = os.pread(self._handle, count, offset)
            if len(data) == count:
                return data
            while len(data) < count:  # a signal, or more than one call gives
                more = os.pread(self._handle, count - len(data), offset + len(data))
                if not more:
                    raise UserError(f"{self.path}: {self._shortened()}; {REMEDY}.")
                data += more
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read any more ({error.strerror or error}); {REMEDY}.") from error
        return data

    def _shortened(self) -> str:
        return (
            f"shortened while it was in use (it has {os.fstat(self._handle).st_size:,} bytes, and had {self.size:,} "
            "when it was opened)"
        )

    def hole(self, end: int) -> tuple[int, int] | None:
        """The first part [begin, end) before byte `end` that was never written, where the file system tells."""
        try:
            begin = os.lseek(self._handle, 0, os.SEEK_HOLE)
            if begin >= end:
                return None
            try:
                return begin, min(end, os.lseek(self._handle, begin, os.SEEK_DATA))
            except OSError as error:
                if error.errno != errno.ENXIO:  # nothing but a hole up to the end
                    raise
                return begin, end
        except OSError:
            return None  # a file system without them

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)


def _open(path: str) -> int:
    """A descriptor; where the process may have no more of them, its limit is raised as far as the system lets it."""
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise UserError(
            f"{path}: the process may open no more than {hard:,} files, and each dataset needs up to eight; raise the "
            "limit (ulimit -Hn), or merge small datasets."
        ) from None


class CheckedArray:
    """Numbers in a file, read where they are asked for: an item, a slice of the first axis, or, as an array, all."""

    def __init__(self, file: CheckedFile, dtype: Any, offset: int, shape: tuple[int, ...]):
        self.file, self.dtype, self.offset, self.shape = file, np.dtype(dtype), offset, shape
        self._row = self.dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))

    def __len__(self) -> int:
        return self.shape[0]

    def part(self, begin: int, end: int) -> np.ndarray:
        """Rows begin <= i < end; read-only."""
        data = self.file.read(self.offset + begin * self._row, (end - begin) * self._row)
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            begin, end, step = at.indices(self.shape[0])
            assert step == 1, "parts are read in one piece"
            return self.part(begin, max(begin, end))
        at = int(at)
        if not -self.shape[0] <= at < self.shape[0]:
            raise IndexError(at)
        at %= self.shape[0]
        return self.part(at, at + 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.part(0, self.shape[0]), dtype)
