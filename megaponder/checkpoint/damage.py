"""Whether a checkpoint may be used: its files are those of its manifest, and all that a run needs is among them."""

from __future__ import annotations

from pathlib import Path

from megaponder.checkpoint import manifest, stored
from megaponder.checkpoint.folder import final
from megaponder.checkpoint.state import CONFIG, STATE, load_state

_NEEDED = (STATE, CONFIG, stored.INDEX, "common.pt", "metadata.json")
"""The last two are megatron-core's."""


def damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Why this checkpoint may not be used, as words that follow "because"; None if it is complete and whole.

    Ranks divide the reading among them by `part`; each finds other damage.
    """
    if (reason := manifest.damage(folder, part, parts)) is not None or part:
        return reason
    listed = manifest.listed(folder)
    try:
        needed = [*_NEEDED, *sorted(stored.files(folder))]
        step = load_state(folder)[0].step
    except ValueError as error:
        return str(error)
    if folder.name.startswith("step_") and folder.name != final(folder, step).name:
        return f"its {STATE} is of step {step}"
    return next((f"its {manifest.MANIFEST} does not list {name}" for name in needed if name not in listed), None)
