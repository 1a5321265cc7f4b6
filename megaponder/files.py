"""Files that are written atomically and survive a crash once they exist."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaponder.errors import UserError

_BLOCK = 1 << 24


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write under a temporary name, fsync, rename: readers see the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes disk-full errors inside the block name this file, since the system names none."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """The same for plain data."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def sync(path: str | os.PathLike[str]) -> None:
    """fsync a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """Remove temporary files that killed processes left behind; only the owner of the folder may call this."""
    for path in folder.glob(".*.tmp"):
        if path.is_file() and path.name.split(".")[-2].isdecimal():
            path.unlink(missing_ok=True)


WINDOW = 4096
"""Bytes of a window."""
_WINDOWS = 64


def windows(size: int) -> list[int]:
    """Offsets of evenly spread windows of a file, multiples of their size: the first, the last and up to 62 between.

    They cover all of a file of at most 256 KiB.
    """
    last = max(0, size - 1) // WINDOW
    step = last / (_WINDOWS - 1)
    return [at * WINDOW for at in sorted({*(int(i * step) for i in range(_WINDOWS - 1)), last})]


def checksum(path: Path, fresh: bool = False) -> int:
    """CRC-32 of a file's bytes; `fresh`: read from the disk or server, not from the system's cache."""
    value = 0
    with path.open("rb") as file:
        if fresh and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def refuse_lost_link(path: Path) -> None:
    """UserError for a broken link, such as one to a disk that is not mounted: the run must not start from scratch."""
    if path.is_symlink() and not path.exists():
        where = path.readlink()
        raise UserError(f"{path} is a link to {where}, which does not exist; restore the target, or remove the link.")


def is_special(path: Path) -> bool:
    """Whether the path is a pipe, a socket or a device: opening one may block for ever."""
    return path.exists() and not (path.is_file() or path.is_dir())


class TooLargeError(UserError, ValueError):
    """Not a regular file, or larger than a file of its kind can be."""


def read_bounded(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of an untrusted file; TooLargeError for more than `most`, a pipe or a device."""
    path = Path(path)
    if is_special(path):
        raise TooLargeError(f"{path} is a pipe or a device; a regular file is needed.")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > most else file.read(most + 1)
    if max(size, len(content)) > most:
        raise TooLargeError(f"{path} has {size:,} bytes; a file of its kind has at most {most:,}.")
    return content


def inside(folder: Path, name: str) -> Path:
    """The path of file `name` in an untrusted folder, with links resolved; UserError if it lies outside the folder.

    Links may point to files below the folder.  In a snapshot of the Hugging Face cache, which is
    `models--.../snapshots/REVISION`, they may also lead to the files of its own `models--.../blobs`.
    """
    if "\0" in name or name in ("", ".", "..") or Path(name).name != name:
        raise UserError(f"{folder}: {name!r} is not a file of this folder.")
    root = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(root / name))
    cached = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    if not (real.is_relative_to(root) or cached):
        raise UserError(f"{folder / name} is a link to {real}, outside its folder; replace it with a copy of the file.")
    return real
