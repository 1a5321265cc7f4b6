"""The folder of an export: modes, links, full disks, and what killed exports leave behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaponder.errors import UserError
from megaponder.export import folder
from megaponder.export.from_hf import import_hf
from megaponder.export.to_hf import export
from tests.export import checkpoints
from tests.full_disk import files_of_at_most


def write(out: Path, word: str = "new", force: bool = False) -> None:
    with folder.published(out, force) as path:
        folder.write_json(path / "config.json", {"word": word})
        folder.write_weights(path, {"weight": torch.ones(9)})


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
def test_files_follow_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write(tmp_path / "hf")
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "hf").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o666 & ~mask)
    assert (tmp_path / "hf").stat().st_mode & 0o777 == 0o777 & ~mask


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """In the weights, which a library in Rust writes, in the tokenizer's copy and in the checkpoint of an import."""
    checkpoints.make("llama", "loop", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hf")
    for limit in (20_000, 100):  # the weights; the first of all files
        with files_of_at_most(limit), pytest.raises(UserError, match=r"full cannot be written: File too large\."):
            export(tmp_path / "run", tmp_path / "full")
    with (
        files_of_at_most(20_000),
        pytest.raises(UserError, match=r"step_00000000 cannot be written: .*distcp: File too large\."),
    ):
        import_hf(tmp_path / "hf", tmp_path / "imported")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "imported", "run"]
    assert list((tmp_path / "imported" / "checkpoints").iterdir()) == []
    import_hf(tmp_path / "hf", tmp_path / "imported")


def killed(work: Callable[[], None]) -> None:
    """Let a child do it, which is killed when it calls `die`."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_export_leaves_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "hf"
    write(out, "old")

    def while_writing() -> None:
        with folder.published(out, True) as path:
            folder.write_json(path / "config.json", {})
            die()

    def between_the_renames() -> None:
        original = Path.rename
        monkeypatch.setattr(Path, "rename", lambda self, to: die() if ".partial-" in self.name else original(self, to))
        write(out, "new", force=True)

    killed(while_writing)
    assert len(list(tmp_path.iterdir())) == 2
    killed(between_the_renames)
    assert not out.exists() and len(list(tmp_path.iterdir())) == 2, "the first one's is swept, the old folder is aside"
    with pytest.raises(UserError, match="already exists"):  # it has come back
        write(out)
    assert folder.read_json(out, "config.json") == {"word": "old"} and list(tmp_path.iterdir()) == [out]
    killed(between_the_renames)
    write(out, "newest", force=True)
    assert folder.read_json(out, "config.json") == {"word": "newest"} and list(tmp_path.iterdir()) == [out]


def test_an_export_at_work_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "hf"
    elsewhere = tmp_path / ".hf.partial-another.host-77"
    elsewhere.mkdir()
    with folder.published(out, False) as path:
        folder.write_json(path / "config.json", {})
        write(tmp_path / "other")
        with pytest.raises(OSError, match="File exists"):  # this process has one at work already
            path.mkdir()
        folder._sweep(out)
        assert path.exists() and elsewhere.exists()
    os.utime(elsewhere, (0, 0))
    write(out, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "other"]


def test_links(tmp_path: Path) -> None:
    """A folder moved to another disk and linked back is replaced there; one that is not mounted is not made anew."""
    disk, out = tmp_path / "disk", tmp_path / "hf"
    write(disk / "moved", "old")
    out.symlink_to(disk / "moved")
    write(out, "new", force=True)
    assert out.is_symlink() and folder.read_json(disk / "moved", "config.json") == {"word": "new"}
    (tmp_path / "lost").symlink_to(tmp_path / "not-mounted" / "hf")
    with pytest.raises(
        UserError, match=r"lost is a link to .*not-mounted/hf, which does not exist; restore the target"
    ):
        write(tmp_path / "lost")
    assert not (tmp_path / "not-mounted").exists()
