"""Publication, damage, choice and retention on plain files, without ranks."""

import json
import os
import pickle
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megaponder.checkpoint import folder, manifest
from megaponder.checkpoint.choose import choose, locate
from megaponder.checkpoint.damage import damage
from megaponder.checkpoint.state import Contents, TrainState, load_state, save_state
from megaponder.errors import UserError
from tests.distributed import Workers


def write_index(path: Path, *shards: str, objects: tuple[str, ...] = ()) -> None:
    places = {MetadataIndex(f"weight{i}"): _StorageInfo(name, 0, 1) for i, name in enumerate(shards)}
    index = Metadata({name: BytesStorageMetadata() for name in objects}, storage_data=places)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def save(root: Path, step: int, size: int = 1000) -> Path:
    path = folder.create(root, step)
    write_index(path, "__0_0.distcp", "__1_0.distcp")
    for name in ("common.pt", "metadata.json", "config.yaml"):
        (path / name).write_text(name)
    shards = [f"__{rank}_0.distcp" for rank in range(2)]
    for rank, name in enumerate(shards):
        (path / name).write_bytes(bytes([step % 256, rank]) * size)
    save_state(path, TrainState(step, 4 * step, 40 * step), Contents(False, {"tensor": 2}))
    return folder.publish(path, root, step, manifest.describe(path, shards))


def test_a_published_checkpoint_is_whole_and_says_where_it_was(tmp_path):
    path = save(tmp_path, 7)
    assert path.name == "step_00000007" and damage(path) is None
    assert load_state(path) == (TrainState(7, 28, 280), Contents(False, {"tensor": 2}))
    names = set(json.loads((path / "manifest.json").read_text())["files"])
    assert names == {
        "__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt", "metadata.json", "config.yaml", "state.json",
    }  # fmt: skip


def truncate(path: Path) -> None:
    os.truncate(path / "__1_0.distcp", 1999)


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[1234] ^= 4
    (path / "__0_0.distcp").write_bytes(data)


def lose_a_file(path: Path) -> None:
    (path / "__1_0.distcp").unlink()


def forget(path: Path, name: str) -> None:
    """Take a file out of the manifest, as someone might who wants a harmed checkpoint to pass."""
    listed = json.loads((path / "manifest.json").read_text())
    del listed["files"][name]
    (path / "manifest.json").write_text(json.dumps(listed))


def forget_a_shard(path: Path) -> None:
    forget(path, "__1_0.distcp")


def lose_and_forget_a_shard(path: Path) -> None:
    forget_a_shard(path)
    lose_a_file(path)


def lose_and_forget_the_index(path: Path) -> None:
    forget(path, ".metadata")
    (path / ".metadata").unlink()


def seal_again(path: Path, *shards: str, objects: tuple[str, ...] = ()) -> None:
    """Another index, with a manifest that fits it."""
    write_index(path, *shards, objects=objects)
    manifest.seal(path)


class Runs:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def plant_code(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Runs(path.parent / "planted")))
    manifest.seal(path)


def change_state(**changes: object):
    def harm(path: Path) -> None:
        values = json.loads((path / "state.json").read_text()) | changes
        (path / "state.json").write_text(json.dumps(values))
        manifest.seal(path)

    return harm


def manifest_is_a_pipe(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def lose_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def spoil_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (truncate, "__1_0.distcp has 1999 bytes instead of 2000"),
        (flip_a_bit, "__0_0.distcp changed"),
        (lose_a_file, "__1_0.distcp is missing"),
        (forget_a_shard, "its manifest.json does not list __1_0.distcp"),
        (lose_and_forget_a_shard, "__1_0.distcp is missing"),
        (lose_and_forget_the_index, ".metadata cannot be read (No such file or directory)"),
        (plant_code, ".metadata is not an index of tensors (it requires posix.mkdir)"),
        (lambda path: seal_again(path, "../x"), "its .metadata names '../x', which is not a file in this folder"),
        (lambda path: seal_again(path, objects=("weight",)), "weight is a pickled object, not a tensor"),
        (change_state(step=3), "its state.json is of step 3"),
        (change_state(step="2"), "state.json is wrong: step = '2': "),
        (change_state(step=True), "state.json is wrong: step = True: "),
        (change_state(sequences=-8), "state.json is wrong: sequences = -8: "),
        (change_state(tokens=80.5), "state.json is wrong: tokens = 80.5: "),
        (change_state(skipped=9), "state.json is not the state of a run (it has more skipped steps, 9, than steps, 2)"),
        (change_state(step=10**30), "state.json is wrong: step = "),
        (change_state(norms=[1e308]), "state.json is wrong: norms.0 = 1e+308: "),
        (change_state(losses=[1.0]), "state.json is not the state of a run (it has 1 losses and 0 norms)"),
        (change_state(contents={"masters": True, "layout": {"tensor": 0}}), "state.json is wrong: layout.tensor = 0: "),
        (manifest_is_a_pipe, "manifest.json cannot be read (it is not a regular file)"),
        (change_state(losses=["x"]), "state.json is wrong: losses.0 = 'x': "),
        (change_state(contents=[]), "state.json is not the state of a run (it has no contents)"),
        (lambda path: (path / "manifest.json").write_text("[" * 100_000), "manifest.json cannot be read"),
        (lose_the_manifest, "no manifest.json"),
        (spoil_the_manifest, "manifest.json cannot be read"),
    ],
)
def test_damage_is_named_and_the_older_checkpoint_taken(tmp_path, harm, words):
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    harm(new)
    choice = choose(tmp_path)
    assert choice.path == old and len(choice.skipped) == 1 and choice.skipped[0][0] == new
    assert words in choice.skipped[0][1]
    assert any("step_00000002" in s and words in s for s in choice.sentences())
    with pytest.raises(UserError, match="step_00000002"):
        locate(new)
    assert locate(tmp_path) == old
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("reader", ["checksum", "listed"])
def test_what_may_not_be_read_is_not_passed_over(tmp_path, monkeypatch, reader):
    """It may be whole, and a run that went back behind it would write it anew."""
    save(tmp_path, 1)
    new, honest = save(tmp_path, 2), getattr(manifest, reader)

    def denied(path, fresh=False):
        if new in (path, path.parent):
            raise PermissionError(13, "Permission denied", str(new / "__0_0.distcp"))
        return honest(path, fresh) if reader == "checksum" else honest(path)

    monkeypatch.setattr(manifest, reader, denied)
    for path in (tmp_path, new):
        with pytest.raises(UserError, match=r"__0_0\.distcp cannot be read \(permission denied\)"):
            locate(path)


def test_ranks_that_divide_the_reading_find_every_flip(tmp_path):
    path = save(tmp_path, 3)
    flip_a_bit(path)
    reasons = [damage(path, part, 3) for part in range(3)]
    assert sum(r is not None for r in reasons) == 1


def test_half_written_folders_are_never_chosen_and_are_swept(tmp_path):
    old = save(tmp_path, 1)
    left = folder.create(tmp_path, 2)
    assert choose(tmp_path).path == old and choose(tmp_path).skipped == ()
    assert folder.sweep(tmp_path) == [left] and left.name.startswith(".step_00000002.")
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_a_damaged_checkpoint_is_replaced_when_the_run_passes_it_again(tmp_path):
    flip_a_bit(save(tmp_path, 1))
    assert damage(save(tmp_path, 1)) is None
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_a_run_folder_that_was_removed_does_not_come_back(tmp_path):
    with pytest.raises(FileNotFoundError):
        folder.create(tmp_path / "gone" / "checkpoints", 1)
    assert not (tmp_path / "gone").exists()


def test_locate_explains_itself(tmp_path):
    with pytest.raises(UserError, match="There is no checkpoint or run folder"):
        locate(tmp_path / "nothing")
    with pytest.raises(UserError, match="contains no intact checkpoint"):
        locate(tmp_path)


def test_retention(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    assert folder.retain(tmp_path, 50, keep_last=2, keep_every=20) == [10, 30]
    assert list(folder.published(tmp_path)) == [50, 40, 20]


@given(st.sets(st.integers(1, 500), min_size=1), st.integers(1, 5), st.sampled_from([0, 1, 7, 100]))
@settings(max_examples=60)
def test_retention_keeps_the_newest_and_every_multiple(steps, last, every):
    gone = folder.expired(list(steps), last, every)
    kept = steps - set(gone)
    assert max(steps) in kept and len(kept) >= min(last, len(steps))
    assert all(not every or s % every for s in gone)
    assert all(s <= min(sorted(steps)[-last:]) for s in gone)


def save_until_killed(root):
    """In a worker: one checkpoint after another."""
    step = max(folder.published(root), default=0)
    (root / "ready").touch()
    while True:
        step += 1
        save(root, step, 200_000)
        folder.retain(root, step, 2, 0)


def test_kill_9_while_saving_leaves_only_whole_checkpoints(tmp_path):
    dice = random.Random(5)
    last = 0
    for kill in range(8):
        workers = Workers("tests.checkpoint.test_folder:save_until_killed", 1, {"root": tmp_path})
        try:
            # however slow the machine, every second time there is a new one
            while not (tmp_path / "ready").exists() or (
                kill % 2 and max(folder.published(tmp_path), default=0) <= last
            ):
                assert workers.poll() == [None], workers.output()
                time.sleep(0.01)
            time.sleep(dice.uniform(0.02, 0.3))
            assert workers.poll() == [None], workers.output()
        finally:
            workers.kill()
        (tmp_path / "ready").unlink()
        found = folder.published(tmp_path)
        assert all(damage(p) is None for p in found.values())
        assert max(found, default=0) >= last
        last = max(found, default=0)
        folder.sweep(tmp_path)
    assert last > 0
