"""The folder of a run's checkpoints: names, atomic publication, retention.

checkpoints/step_00001000/        complete by definition: it got this name by one rename after all ranks were done
checkpoints/.step_00002000.tmp/   being written, or left by a run that was killed while saving
checkpoints/.step_00000500.old/   being deleted
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from megaponder import files
from megaponder.checkpoint import manifest

_NAME = re.compile(r"step_(\d{8,})")


def final(root: Path, step: int) -> Path:
    """Published name of a step's checkpoint."""
    return root / f"step_{step:08d}"


def temporary(root: Path, step: int) -> Path:
    """Name under which a checkpoint is written."""
    return root / f".step_{step:08d}.tmp"


def published(root: Path) -> dict[int, Path]:
    """Published checkpoints by step, newest first."""
    found = {int(m[1]): p for p in root.iterdir() if (m := _NAME.fullmatch(p.name))} if root.is_dir() else {}
    return dict(sorted(found.items(), reverse=True))


def begin(root: Path, step: int) -> Path:
    """An empty folder to write into."""
    path = temporary(root, step)
    shutil.rmtree(path, ignore_errors=True)
    root.mkdir(exist_ok=True)  # not its parent: a run folder that was removed shall not come back without its lock
    path.mkdir()
    return path


def publish(root: Path, step: int) -> Path:
    """Seal what was written for `step` and give it its final name.  One rank calls this after all ranks are done."""
    path, target = temporary(root, step), final(root, step)
    manifest.seal(path)
    if target.exists():  # a damaged checkpoint that the resumed run skipped and has now passed again
        remove(target)
    path.rename(target)
    files.sync(root)
    return target


def remove(path: Path) -> None:
    """Delete a checkpoint; a kill half-way leaves nothing under a published name."""
    grave = path.with_name(f".{path.name}.old")
    shutil.rmtree(grave, ignore_errors=True)
    path.rename(grave)
    shutil.rmtree(grave)


def sweep(root: Path) -> list[Path]:
    """Delete what killed runs have left behind; returns it.  Only the owner of the run folder may call this."""
    left = [p for p in root.iterdir() if p.name.startswith(".step_")] if root.is_dir() else []
    for path in left:
        shutil.rmtree(path)
    return left


def expired(steps: list[int], keep_last: int, keep_every: int) -> list[int]:
    """Which steps may go: all but the `keep_last` newest and the multiples of `keep_every` (0: none)."""
    newest = set(sorted(steps)[-keep_last:]) if keep_last else set()
    return [s for s in sorted(steps) if s not in newest and not (keep_every and s % keep_every == 0)]


def retain(root: Path, keep_last: int, keep_every: int) -> list[int]:
    """Delete what `expired` names; returns the steps that are gone."""
    all_steps = published(root)
    gone = expired(list(all_steps), max(1, keep_last), keep_every)
    for step in gone:
        remove(all_steps[step])
    return gone
