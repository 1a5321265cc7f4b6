"""Whether a checkpoint may be used: its files match its manifest, and everything that a run needs is among them."""

from __future__ import annotations

from pathlib import Path

from megaponder.checkpoint import manifest, reader
from megaponder.checkpoint.folder import final
from megaponder.checkpoint.state import CONFIG, STATE, load_state

_NEEDED = (STATE, CONFIG, manifest.INDEX, "common.pt", "metadata.json")
"""The last two are megatron-core's."""


def damage(folder: Path, part: int = 0, parts: int = 1) -> manifest.Damage | None:
    """Why this checkpoint may not be used, as words that follow "because"; None if it is complete and intact.

    Ranks divide the reading by `part`; each finds different damage.
    """
    if (lost := lost_link(folder)) is not None:
        return lost
    if (reason := manifest.damage(folder, part, parts)) is not None or part:
        return reason
    listed = manifest.listed(folder)
    try:
        step = load_state(folder)[0].step
        lacks = reader.unlisted(folder, listed)
    except ValueError as error:
        return manifest.Damage(error)
    if folder.name.startswith("step_") and folder.name != final(folder, step).name:
        return manifest.Damage(f"its {STATE} is of step {step}")
    lacks = lacks or next((f"does not list {name}" for name in _NEEDED if name not in listed), None)
    return manifest.Damage(f"its {manifest.MANIFEST} {lacks}") if lacks else None


def lost_link(folder: Path) -> manifest.Forbidden | None:
    """A checkpoint that is a broken link: on a disk that is not mounted, it may be intact."""
    if not folder.is_symlink() or folder.exists():
        return None
    where = f"it is a link to {folder.readlink()}, which does not exist"
    return manifest.Forbidden(f"{where}; restore the target, or remove the link to continue without it")
