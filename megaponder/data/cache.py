"""Folders of numpy arrays that many ranks, nodes and jobs may build and read at the same time.

A set of arrays is a folder named by a hash of everything that determines it.  It is built under a temporary name and
becomes visible by one rename, so a reader sees all of it or nothing, and a valid set is never replaced.  Every process
compares checksums before it uses a set: wrong numbers in an order would mean different training data.  A file lock only
avoids building twice: where locks do not work (some network file systems) every process builds, the first rename wins,
and the others use its result.  No rank relies on another: on nodes with private disks the first process of each node
builds.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from megaponder import files, processes
from megaponder.data.checked import CheckedArray, CheckedFile
from megaponder.errors import UserError

Arrays = dict[str, np.ndarray]
Stored = dict[str, CheckedArray]
"""Arrays of a published set, read from its files as they are needed."""

SUMS = "checksums.json"


def _load(folder: Path, names: tuple[str, ...]) -> Stored | None:
    """A published set; None if it is missing or damaged (a later build replaces it)."""
    try:
        sums = json.loads((folder / SUMS).read_text())
        if sums != {name: files.checksum(folder / f"{name}.npy") for name in names}:
            return None
        return {name: _stored(folder / f"{name}.npy") for name in names}
    except (OSError, ValueError, EOFError):  # absent, truncated, not an array
        return None


def _stored(path: Path) -> CheckedArray:
    """The array in a .npy file; ValueError if it is not one."""
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if fortran or dtype.hasobject:
            raise ValueError(f"{path} is not an array of plain numbers")
        return CheckedArray(CheckedFile(path), dtype, file.tell(), shape)


def _publish(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    aside = folder.with_name(f"{folder.name}.tmp-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        aside.mkdir()
        for name, array in arrays.items():
            with open(aside / f"{name}.npy", "wb") as out:
                np.save(out, array, allow_pickle=False)
                out.flush()
                os.fsync(out.fileno())
        files.write_json(aside / SUMS, {name: files.checksum(aside / f"{name}.npy") for name in arrays})
        files.sync(aside)
        try:
            os.rename(aside, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first
                raise
        files.sync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _remove_orphans(folder: Path) -> None:
    """Delete what killed builders of this set on this host left behind."""
    host = socket.gethostname()
    for orphan in folder.parent.glob(f"{folder.name}.tmp-{host}-*"):
        pid = orphan.name.rsplit("-", 2)[1]
        if pid.isdecimal() and not processes.runs(int(pid)):
            shutil.rmtree(orphan, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, ready: Callable[[], bool], wait_seconds: float) -> Iterator[None]:
    """Hold the set's lock; return at once when `ready` or if the file system has no locks."""
    path = folder.with_name(f"{folder.name}.lock")
    lock = FileLock(str(path))
    deadline = time.monotonic() + wait_seconds
    held = False
    while not held and not ready():
        try:
            lock.acquire(timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            held = True
        except Timeout:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"{path}: another process has held this lock for more than {wait_seconds:.0f} s while building "
                    f"{folder}; if no such process is alive, delete the lock file and start again."
                ) from None
        except (NotImplementedError, OSError) as error:
            if isinstance(error, PermissionError):
                raise
            break  # no locks here: build without one
    try:
        yield
    finally:
        if held:
            lock.release()


def cached_arrays(
    root: str | os.PathLike[str],
    key: str,
    names: tuple[str, ...],
    build: Callable[[], Arrays],
    wait_seconds: float = 600.0,
) -> Stored:
    """The arrays `names` of set `key` under `root`, built by `build` if they do not exist.

    Raises UserError that names the file when the folder cannot be written or a builder holds its lock too long.
    """
    folder = Path(root) / key
    arrays = _load(folder, names)
    if arrays is not None:
        return arrays
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, lambda: _load(folder, names) is not None, wait_seconds):
            arrays = _load(folder, names)
            if arrays is None:
                _remove_orphans(folder)
                if folder.exists():  # damaged: moved away, never changed in place
                    os.rename(folder, folder.with_name(f"{folder.name}.damaged-{secrets.token_hex(4)}"))
                _publish(folder, build())
                arrays = _load(folder, names)
    except OSError as error:
        raise UserError(
            f"{folder}: the index cache cannot be written ({error}); set data.cache to another folder."
        ) from error
    if arrays is None:
        raise UserError(f"{folder}: the index cache was written but cannot be read back; check the disk.")
    return arrays
