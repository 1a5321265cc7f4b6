"""Files that are read instead of mapped into memory.

A memory map of a file that is truncated, or deleted on a file server, kills the process with SIGBUS and no message.  A
read of such a file comes back short or with an error, which can be reported.  An open file also stays the file that was
opened: another one put under the same name later does not mix with it.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import Any

import numpy as np

from megaponder.errors import UserError

REMEDY = "restore the original file and run the same command again"


class CheckedFile:
    """An open file of known size.  Threads may share it: reads use no shared position."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._handle = -1
        self._handle = _open(self.path)
        self.status = os.fstat(self._handle)
        """Its status when it was opened."""

    @property
    def size(self) -> int:
        """Size in bytes when it was opened."""
        return self.status.st_size

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset`.  UserError if they cannot be read or no longer exist."""
        try:
            data = os.pread(self._handle, count, offset)
            if len(data) == count:
                return data
            while len(data) < count:  # a signal, or more than one call can return
                more = os.pread(self._handle, count - len(data), offset + len(data))
                if not more:
                    raise UserError(f"{self.path}: {self._shortened()}; {REMEDY}.")
                data += more
        except OSError as error:
            raise UserError(f"{self.path}: can no longer be read ({error.strerror or error}); {REMEDY}.") from error
        return data

    def _shortened(self) -> str:
        return (
            f"truncated while in use (it has {os.fstat(self._handle).st_size:,} bytes, and had {self.size:,} "
            "when it was opened)"
        )

    def hole(self, end: int) -> tuple[int, int] | None:
        """The first region [begin, end) before byte `end` that was never written, if the file system can tell."""
        try:
            begin = os.lseek(self._handle, 0, os.SEEK_HOLE)
            if begin >= end:
                return None
            try:
                return begin, min(end, os.lseek(self._handle, begin, os.SEEK_DATA))
            except OSError as error:
                if error.errno != errno.ENXIO:  # a hole up to the end
                    raise
                return begin, end
        except OSError:
            return None  # a file system without hole detection

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)


def _open(path: str) -> int:
    """A descriptor; if the process has reached its limit, the limit is raised as far as the system allows."""
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
            f"{path}: the process may open at most {hard:,} files, and each dataset needs up to eight; raise the "
            "limit (ulimit -Hn), or merge small datasets."
        ) from None


class CheckedArray:
    """Numbers in a file, read on demand: an item, a slice of the first axis, or, as an array, all."""

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
            assert step == 1, "slices must be contiguous"
            return self.part(begin, max(begin, end))
        at = int(at)
        if not -self.shape[0] <= at < self.shape[0]:
            raise IndexError(at)
        at %= self.shape[0]
        return self.part(at, at + 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.part(0, self.shape[0]), dtype)
