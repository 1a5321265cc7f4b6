"""The folder of a run's checkpoints: names, atomic publication, retention.

checkpoints/step_00001000/               complete by definition: renamed to this name after all ranks agreed
checkpoints/.step_00002000.1f03.tmp/     being written, or left by a run that was killed while saving
checkpoints/.step_00000500.77ac.old/     being deleted

A checkpoint may be a link, for example after it was moved to another disk: it is used like any other, and deleting it
removes only the link.
"""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path

from megaponder import files
from megaponder.checkpoint import manifest

_NAME = re.compile(r"step_(\d{8,})")


def final(root: Path, step: int) -> Path:
    """Published name of a step's checkpoint."""
    return root / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Step of a published name."""
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _aside(path: Path, end: str) -> Path:
    """A new hidden name: writers of a killed run may still use their old one."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{end}")


def published(root: Path) -> dict[int, Path]:
    """Published checkpoints by step, newest first."""
    found = {int(m[1]): p for p in root.iterdir() if (m := _NAME.fullmatch(p.name))} if root.is_dir() else {}
    return dict(sorted(found.items(), reverse=True))


def create(root: Path, step: int) -> Path:
    """An empty folder to write into."""
    path = _aside(final(root, step), "tmp")
    root.mkdir(exist_ok=True)  # not its parent: a removed run folder must not reappear without its lock
    path.mkdir()
    return path


def publish(path: Path, root: Path, step: int, known: manifest.Files | None = None) -> Path:
    """Seal what was written to `path` for `step` and give it its final name.  One rank calls this after all are done.

    `known`: size and checksum of the writers' files; the others are read for their checksums.
    """
    target = final(root, step)
    manifest.seal(path, known)
    grave = None
    if target.is_symlink():
        target.unlink()
    elif target.exists():  # a damaged checkpoint that the resumed run skipped and has now reached again
        grave = target.rename(_aside(target, "old"))
    path.rename(target)
    files.sync(root)
    if grave is not None:
        _delete(grave)
    return target


def remove(path: Path) -> None:
    """Delete a checkpoint, or the link to it; a kill half-way leaves nothing under its published name."""
    _delete(path if path.is_symlink() else path.rename(_aside(path, "old")))


def discard(path: Path) -> None:
    """Delete what a failed save has written, as far as possible."""
    shutil.rmtree(path, ignore_errors=True)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sweep(root: Path) -> list[Path]:
    """Delete and return what killed runs left behind.  Only the owner of the run folder may call this."""
    left = [p for p in root.iterdir() if p.name.startswith(".step_")] if root.is_dir() else []
    for path in left:
        # under a new name: a writer that has outlived its run would create new files in it
        _delete(path if path.is_symlink() else path.rename(path.with_name(f".step_{secrets.token_hex(4)}.old")))
    return left


def expired(steps: list[int], keep_last: int, keep_every: int) -> list[int]:
    """Which steps may go: all but the `keep_last` newest and the multiples of `keep_every` (0: none)."""
    newest = set(sorted(steps)[-keep_last:]) if keep_last else set()
    return [s for s in sorted(steps) if s not in newest and not (keep_every and s % keep_every == 0)]


def retain(root: Path, intact: int, keep_last: int, keep_every: int) -> list[int]:
    """Delete what `expired` names; returns the steps that are gone.

    `intact` is a step whose checkpoint has just been found intact, and stays.  Newer ones are neither counted nor
    touched: the run has skipped them as damaged, and they must not displace the ones it relies on.
    """
    all_steps = {step: path for step, path in published(root).items() if step <= intact}
    gone = expired(list(all_steps), max(1, keep_last), keep_every)
    for step in gone:
        remove(all_steps[step])
    return gone
