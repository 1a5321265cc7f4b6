"""Run folders, each with one entry missing, renamed, cut or linked: what is chosen, and what is kept."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from megaponder import files
from megaponder.checkpoint import folder, manifest
from megaponder.checkpoint.choose import choose
from megaponder.checkpoint.damage import damage
from megaponder.errors import UserError
from tests.checkpoint.test_folder import save
from tests.layouts.cases import WHOLE

STEPS = (2, 4, 6, 8)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clean") / "checkpoints"
    for step in STEPS:
        save(root.parent / "checkpoints", step, size=20)
    return root


def lose(path: Path, aside: Path, dice: random.Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def rename(path: Path, aside: Path, dice: random.Random) -> None:
    others = [p.name for p in path.parent.iterdir()]
    path.rename(path.with_name(dice.choice([f"{path.name}.bak", path.name[:-1], "step_00000005", f"x{others[0]}"])))


def cut(path: Path, aside: Path, dice: random.Random) -> None:
    whole = dice.choice([p for p in path.iterdir() if p.is_file()]) if path.is_dir() else path
    os.truncate(whole, dice.randrange(whole.stat().st_size))


def link(path: Path, aside: Path, dice: random.Random) -> None:
    """Moved away and linked back; sometimes what it led to is gone."""
    aside.mkdir()
    path.rename(aside / path.name)
    path.symlink_to(aside / path.name)
    if dice.random() < 0.3:
        (aside / path.name).rename(aside / "gone")


def content(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.mark.parametrize("harm", [lose, rename, cut, link])
def test_the_newest_whole_one_is_taken_and_the_last_whole_one_kept(clean: Path, tmp_path: Path, harm) -> None:
    dice, honest = random.Random(harm.__name__), {p.name: content(p) for p in clean.iterdir()}
    for case in range(75 if WHOLE else 25):
        run = tmp_path / str(case)
        root = run / "checkpoints"
        shutil.copytree(clean, root)
        # an entry of the folder of checkpoints, or of one of them; of the newer ones more often
        checkpoint = dice.choices(list(folder.published(root).values()), weights=(4, 2, 1, 1))[0]
        entry = dice.choice([checkpoint, *checkpoint.iterdir()])
        harm(entry, run / "aside", dice)

        intact = []
        for path in root.iterdir():  # by the bytes themselves, not by what is under test
            if path.name in honest and path.is_dir() and content_or_none(path) == honest[path.name]:
                intact.append(int(path.name[5:]))
        lost = [p for p in folder.published(root).values() if p.is_symlink() and not p.exists()]
        if lost and max(intact) < int(lost[0].name[5:]):
            with pytest.raises(UserError, match=r"is a link to .*, which does not exist; restore the target"):
                choose(root)
            continue
        chosen = choose(root).path
        assert chosen is not None and int(chosen.name[5:]) == max(intact), (harm.__name__, entry, chosen)

        before = content(chosen)
        for last in (1, 2):
            folder.retain(root, max(intact), keep_last=last, keep_every=0)
            assert choose(root).path == chosen and content(chosen) == before
        # the run goes on, and passes what it had skipped
        for step in sorted({max(intact) + 1, 9}):
            save(root, step, size=20)
            folder.retain(root, step, keep_last=1, keep_every=0)
            assert choose(root).path is not None
            assert any(damage(p) is None for p in folder.published(root).values())
        assert list(folder.published(root)) == [9]
        folder.sweep(root)
        assert [p.name for p in root.iterdir() if p.name.startswith(".")] == []
        if harm is link and entry is checkpoint and (aside := run / "aside" / entry.name).is_dir():
            assert content(aside) == honest[entry.name], "what a link leads to is not ours to delete"


def content_or_none(path: Path) -> dict[str, bytes] | None:
    """None where a file is not there, or cannot be read."""
    try:
        return content(path)
    except OSError:
        return None


@pytest.mark.parametrize("name", ["checkpoints", "run"])
def test_a_link_that_leads_nowhere_begins_nothing_anew(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path / "not-mounted")
    with pytest.raises(
        UserError, match=rf"{name} is a link to .*/not-mounted, which does not exist; restore the target"
    ):
        files.refuse_lost_link(tmp_path / name)


def test_folders_that_are_links_work(tmp_path: Path) -> None:
    """The folder of checkpoints on another disk, and one checkpoint moved to a third."""
    (tmp_path / "disk").mkdir()
    root = tmp_path / "checkpoints"
    root.symlink_to(tmp_path / "disk")
    old = save(root, 1)
    old.rename(tmp_path / "archive")
    old.symlink_to(tmp_path / "archive")
    assert choose(root).path == old and damage(old) is None
    save(root, 2)
    assert folder.retain(root, 2, keep_last=1, keep_every=0) == [1]
    assert [p.name for p in root.iterdir()] == ["step_00000002"]
    assert manifest.damage(tmp_path / "archive") is None


def test_what_killed_writers_of_small_files_leave_is_swept(tmp_path: Path) -> None:
    for name in (".config.yaml.123.tmp", ".run_id.9.tmp", ".kept.tmp", "notes.5.tmp", "config.yaml"):
        (tmp_path / name).touch()
    files.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".kept.tmp", "config.yaml", "notes.5.tmp"]
