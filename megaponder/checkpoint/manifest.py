"""Names, sizes and checksums of a checkpoint's files: what "complete" means, and how damage is found.

Every rank that writes data adds a part (`manifest-part-<rank>.json`) from the process that wrote it, so that checksums
cost the training loop nothing; the publisher merges the parts into `manifest.json` and adds the small files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from megaponder.files import checksum, read_bounded, sync, write_json

MANIFEST = "manifest.json"
LARGEST = 1 << 26
"""Bytes of a manifest; one of ten thousand ranks has some two million."""
_PART = "manifest-part-"


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Size and checksum of files by name."""
    return {name: {"bytes": (folder / name).stat().st_size, "crc32": checksum(folder / name)} for name in names}


def write_part(folder: Path, rank: int, names: Iterable[str]) -> None:
    """Record the files that a rank has written; called in the process that wrote them."""
    write_json(folder / f"{_PART}{rank}.json", describe(folder, names))


def seal(folder: Path) -> None:
    """Merge all parts, add every other file, write the manifest and bring all of it to the disk."""
    files: dict[str, dict[str, int]] = {}
    for part in sorted(folder.glob(f"{_PART}*.json")):
        files |= json.loads(part.read_text())
        part.unlink()
    files |= describe(folder, (p.name for p in folder.iterdir() if p.name not in files and p.name != MANIFEST))
    for name in files:
        sync(folder / name)
    write_json(folder / MANIFEST, {"files": dict(sorted(files.items()))})  # syncs the folder, too


class Forbidden(str):
    """A reason that says nothing about the checkpoint, which may be whole: it may not be read."""

    @classmethod
    def by(cls, error: PermissionError) -> Forbidden:
        """With the name of the file."""
        return cls(f"{error.filename} may not be read (permission denied)")


def damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Why this checkpoint may not be used, as words that follow "because"; None if it is complete and whole.

    Sizes of all files are compared; checksums only of this part's share of the bytes, so that ranks can divide the
    reading among them.
    """
    try:
        files = listed(folder)
    except PermissionError as error:
        return Forbidden.by(error)
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, OSError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name, want in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != want["bytes"]:
            return f"{name} has {size} bytes instead of {want['bytes']}"
    for name in _share(files, part, parts):
        try:
            if checksum(folder / name) != files[name]["crc32"]:
                return f"{name} has changed since it was written (its CRC-32 differs)"
        except PermissionError as error:
            return Forbidden.by(error)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def size(folder: Path) -> int:
    """Bytes of all files in the manifest."""
    return sum(f["bytes"] for f in listed(folder).values())


def listed(folder: Path) -> dict[str, dict[str, int]]:
    """Size and checksum of the manifest's files by name; ValueError if it lists anything but files of its folder."""
    if not (folder / MANIFEST).is_file() and (folder / MANIFEST).exists():
        raise ValueError("it is no file")  # a pipe would make us wait
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


def _share(files: dict[str, dict[str, int]], part: int, parts: int) -> list[str]:
    """The files of one part, by size so that every part reads about as many bytes."""
    order = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    return order[part::parts]
