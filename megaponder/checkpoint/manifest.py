"""Names, sizes and checksums of a checkpoint's files: what "complete" means, and how damage is found.

Every process that writes data computes the checksums of its own files, so they cost the training loop nothing; the
publisher collects them and adds the small files.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path

from megaponder.files import WINDOW, checksum, read_bounded, sync, windows, write_json

MANIFEST = "manifest.json"
LARGEST = 1 << 26
"""Bytes of a manifest; one of ten thousand ranks has some two million."""
INDEX = ".metadata"
"""PyTorch's index of the tensors."""
Files = dict[str, dict[str, int]]
"""Size (`bytes`) and checksum (`crc32`) of files by name."""


def describe(folder: Path, names: Iterable[str]) -> Files:
    """Size and checksum of files by name."""
    return {name: {"bytes": (folder / name).stat().st_size, "crc32": checksum(folder / name)} for name in names}


def seal(folder: Path, known: Files | None = None) -> None:
    """Write the manifest: the files whose writers know size and checksum, and all others, which are fsynced."""
    found = dict(known or {})
    # other hidden files are not part of it: left by writers, or by NFS in place of an open file
    own = {p.name for p in folder.iterdir() if p.name == INDEX or not p.name.startswith(".")} - found.keys()
    found |= describe(folder, own - {MANIFEST})
    for name in own - {MANIFEST}:
        sync(folder / name)
    write_json(folder / MANIFEST, {"files": dict(sorted(found.items()))})  # syncs the folder, too


class Damage(str):
    """Why a checkpoint may not be used, as words that follow "because", and the file at fault if it is one."""

    file: str | None = None

    @classmethod
    def of(cls, file: str, words: str) -> Damage:
        """`words` follow the name of the file."""
        found = cls(f"{file} {words}")
        found.file = file
        return found


class Forbidden(Damage):
    """A reason that says nothing about the checkpoint, which may be intact: it cannot be read, or is not there now."""

    @classmethod
    def by(cls, error: PermissionError) -> Forbidden:
        """With the name of the file."""
        what = f"{error.filename} cannot be read (permission denied)"
        return cls(f"{what}; change its mode or owner, or move it away")


def damage(folder: Path, part: int = 0, parts: int = 1) -> Damage | None:
    """Why this checkpoint may not be used; None if it is complete and intact.

    Sizes of all files are compared; checksums only of this part's share of the bytes, so that ranks can divide the
    reading among them.
    """
    if (reason := outline(folder)) is not None:
        return reason
    files = listed(folder)
    return next((reason for name in _share(files, part, parts) if (reason := changed(folder, name, files[name]))), None)


def outline(folder: Path) -> Damage | None:
    """The part of `damage` that reads no data: the manifest, and whether its files are there with their sizes."""
    try:
        return missing(folder, listed(folder))
    except PermissionError as error:
        return Forbidden.by(error)
    except FileNotFoundError:
        return Damage(f"it has no {MANIFEST}")
    except (ValueError, OSError, RecursionError) as error:
        return Damage(f"its {MANIFEST} cannot be read ({error})")


def missing(folder: Path, files: Files) -> Damage | None:
    """The first file that is missing or has the wrong size."""
    for name, want in files.items():
        path = folder / name
        if not path.is_file():
            return Damage.of(name, "is missing")
        if (size := path.stat().st_size) != want["bytes"]:
            return Damage.of(name, f"has {size} bytes instead of {want['bytes']}")
    return None


def changed(folder: Path, name: str, want: dict[str, int], fresh: bool = False) -> Damage | None:
    """Damage of one file, whose bytes are read; `fresh`: from the disk, not from this machine's cache."""
    if (reason := missing(folder, {name: want})) is not None:
        return reason
    try:
        if checksum(folder / name, fresh) != want["crc32"]:
            return Damage.of(name, "changed after it was written (its CRC-32 differs)")
    except PermissionError as error:
        return Forbidden.by(error)
    except OSError as error:
        return Damage.of(name, f"cannot be read ({error.strerror})")
    return None


def samples(folder: Path) -> dict[str, int]:
    """Checksum of each listed file's `windows`, to compare what nodes see: cheap enough for all of them.

    A file that cannot be read has -1.
    """
    found = {}
    for name, want in listed(folder).items():
        value = 0
        try:
            with (folder / name).open("rb") as file:
                for at in windows(want["bytes"]):
                    file.seek(at)
                    value = zlib.crc32(file.read(WINDOW), value)
        except OSError:
            value = -1
        found[name] = value
    return found


def size(folder: Path) -> int:
    """Bytes of all files in the manifest."""
    return sum(f["bytes"] for f in listed(folder).values())


def digest(folder: Path) -> str | None:
    """A digest that identifies a manifest; None if there is none to read."""
    path = folder / MANIFEST
    try:
        return hashlib.sha256(read_bounded(path, LARGEST)).hexdigest() if path.is_file() else None
    except (OSError, ValueError):
        return None


def listed(folder: Path) -> Files:
    """Size and checksum of the manifest's files by name; ValueError if it lists anything but files of its folder."""
    if not (folder / MANIFEST).is_file() and (folder / MANIFEST).exists():
        raise ValueError("it is not a regular file")  # reading a pipe would block
    found = json.loads(read_bounded(folder / MANIFEST, LARGEST))
    files = found.get("files") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError("it lists no files")
    for name, want in files.items():
        if name in (".", "..") or Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file in this folder")
        if not isinstance(want, dict) or not all(type(want.get(key)) is int for key in ("bytes", "crc32")):
            raise ValueError(f"{name} has no size or no checksum")
    return files


def _share(files: Files, part: int, parts: int) -> list[str]:
    """The files of one part, balanced so that every part reads about the same number of bytes."""
    order = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    return order[part::parts]
