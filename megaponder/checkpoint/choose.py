"""Which checkpoint a run continues from, and why newer ones were skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megaponder import files
from megaponder.checkpoint import folder, manifest
from megaponder.checkpoint.damage import damage
from megaponder.checkpoint.state import STATE
from megaponder.errors import UserError

Check = Callable[[Path], "str | None"]
"""Damage of a checkpoint, or None; with many ranks, agreed by all of them."""


@dataclass(frozen=True)
class Choice:
    """The chosen checkpoint, if any, and the newer ones that were skipped, with reasons."""

    path: Path | None
    skipped: tuple[tuple[Path, str], ...] = ()

    def sentences(self) -> list[str]:
        """The choice as sentences for the user."""
        lines = [f"Skipped checkpoint {path}: {reason}." for path, reason in self.skipped]
        return [*lines, f"Resuming from checkpoint {self.path}."] if self.path else lines


def choose(root: Path, check: Check = damage) -> Choice:
    """The newest published checkpoint of `root` without damage; UserError if one that may be intact cannot be read."""
    return first_intact(folder.published(root).values(), check)


def first_intact(paths: Iterable[Path], check: Check = damage) -> Choice:
    """The first of these checkpoints without damage; UserError as `choose`."""
    skipped: list[tuple[Path, str]] = []
    for path in paths:
        reason = check(path)
        if reason is None:
            return Choice(path, tuple(skipped))
        if isinstance(reason, manifest.Forbidden):  # resuming from an earlier one would overwrite it
            raise UserError(f"Checkpoint {path}: {reason}.")
        skipped.append((path, reason))
    return Choice(None, tuple(skipped))


@dataclass(frozen=True)
class Source:
    """What a user named to load from."""

    path: Path
    candidates: list[Path]
    """Checkpoints, the best one first."""
    is_checkpoint: bool
    """The path is a checkpoint itself, so no other will do."""

    def intact(self, check: Check = damage, warn: bool = True) -> Path:
        """The checkpoint to use; UserError if there is none or it is damaged.  `warn`: about skipped ones."""
        if self.is_checkpoint:
            if (reason := check(self.path)) is not None:
                raise UserError(f"Checkpoint {self.path} cannot be used because {reason}.")
            return self.path
        choice = first_intact(self.candidates, check)
        if choice.path is None:
            why = " ".join(choice.sentences()) or "Give a step_... folder or the folder of a run that has saved one."
            raise UserError(f"{self.path} contains no intact checkpoint. {why}")
        for checkpoint, reason in choice.skipped if warn else ():
            warning = f"warning: {checkpoint} is damaged ({reason}), so {choice.path} is used."
            print(warning, file=sys.stderr, flush=True)
        return choice.path


def is_own(path: Path) -> bool:
    """Whether a folder is a checkpoint or a run that has saved one."""
    return any((path / name).exists() for name in (STATE, manifest.MANIFEST, "checkpoints"))


def named(path: str | Path) -> Source:
    """What a user wrote: a checkpoint folder, or a run folder with its checkpoints; UserError if it is neither."""
    path = Path(path)
    files.refuse_lost_link(path)
    if not path.is_dir():
        raise UserError(f"There is no checkpoint or run folder {path}.")
    if (path / STATE).is_file() or (path / manifest.MANIFEST).is_file():
        return Source(path, [path], True)
    if (path / "config.json").is_file() and not (path / "checkpoints").exists():
        raise UserError(
            f"{path} is a Hugging Face folder, neither a checkpoint nor a run: megaponder import makes a run of it, "
            "megaponder generate and eval read it as it is."
        )
    files.refuse_lost_link(path / "checkpoints")
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return Source(path, list(folder.published(root).values()), False)


def locate(path: str | Path) -> Path:
    """A checkpoint folder from what a user wrote: the folder itself, or a run folder (its newest complete checkpoint).

    Raises UserError if there is none or if the named one is damaged; reports skipped ones on stderr.
    """
    return named(path).intact()
