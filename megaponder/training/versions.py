"""What computes: versions of libraries, and a digest of this package's own code; they must be alike on all nodes."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

import megaponder

CODE = Path(megaponder.__file__).parent


def versions() -> dict[str, str]:
    """By name.  A version number does not tell two checkouts apart, and an installed package has no revision."""
    return {
        "megaponder": megaponder.__version__,
        "megaponder's code": code_digest(CODE),
        "torch": installed("torch"),
        "megatron-core": installed("megatron-core"),
        "transformer-engine": installed("transformer-engine"),
    }


def installed(package: str) -> str:
    """The version of a package; `none` where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def code_digest(folder: Path) -> str:
    """12 digits of a hash over names and content of all Python files below the folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder).as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:12]
