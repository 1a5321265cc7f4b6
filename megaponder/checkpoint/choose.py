"""Which checkpoint a run continues from, and why newer ones were passed over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megaponder.checkpoint import folder, manifest
from megaponder.checkpoint.damage import damage
from megaponder.checkpoint.state import STATE
from megaponder.errors import UserError

Check = Callable[[Path], "str | None"]
"""Damage of a checkpoint, or None; with many ranks, agreed by all of them."""


@dataclass(frozen=True)
class Choice:
    """The checkpoint taken, if any, and the newer ones that were not, with reasons."""

    path: Path | None
    skipped: tuple[tuple[Path, str], ...] = ()

    def sentences(self) -> list[str]:
        """What a person should read about the choice."""
        lines = [f"Skipped checkpoint {path}: {reason}." for path, reason in self.skipped]
        return [*lines, f"Resuming from checkpoint {self.path}."] if self.path else lines


def choose(root: Path, check: Check = damage) -> Choice:
    """The newest published checkpoint of `root` without damage; UserError if one that may be whole may not be read."""
    skipped: list[tuple[Path, str]] = []
    for path in folder.published(root).values():
        reason = check(path)
        if reason is None:
            return Choice(path, tuple(skipped))
        if isinstance(reason, manifest.Forbidden):  # going back behind it would write it anew
            raise UserError(f"Checkpoint {path}: {reason}; change its mode or owner, or move it away.")
        skipped.append((path, reason))
    return Choice(None, tuple(skipped))


def locate(path: str | Path) -> Path:
    """A checkpoint folder from what a user wrote: the folder itself, or a run folder (its newest whole checkpoint).

    Raises UserError if there is none or if the named one is damaged; says on stderr what was passed over.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"There is no checkpoint or run folder {path}.")
    if (path / STATE).is_file() or (path / manifest.MANIFEST).is_file():
        if (reason := damage(path)) is not None:
            raise UserError(f"Checkpoint {path} cannot be used because {reason}.")
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    choice = choose(root)
    if choice.path is None:
        why = " ".join(choice.sentences()) or "Name a step_... folder or the folder of a run that has saved."
        raise UserError(f"{path} holds no whole checkpoint. {why}")
    for checkpoint, reason in choice.skipped:
        print(f"warning: {checkpoint} is damaged ({reason}), so {choice.path} is used.", file=sys.stderr, flush=True)
    return choice.path
