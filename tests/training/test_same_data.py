"""Data are what all ranks say they are, and a step without targets is no step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaponder.checkpoint import folder
from megaponder.checkpoint.state import load_state
from megaponder.monitor.jsonl import read
from tests.distributed import Workers
from tests.layouts.cases import WHOLE
from tests.training.conftest import Base

HERE = "tests.training.data_workers"


def run(target: str, root: Path, data: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Results of both ranks, and what was printed, by the run's name (the rank that logs depends on the layout)."""
    workers = Workers(f"{HERE}:{target}", 2, {"root": str(root), "data": data})
    try:
        results = workers.wait(600)
        texts: dict[str, str] = {}
        for rank in (0, 1):
            for part in workers.output(rank).split("== ")[1:]:
                path, _, text = part.partition("\n")
                name = path.rpartition("/")[2]
                texts[name] = texts.get(name, "") + text
        return results, texts
    finally:
        workers.kill()


@pytest.fixture(scope="module")
def data(base: Base) -> str:
    """The data of the uninterrupted run, in a folder of their own."""
    target = base.root / "same-data"
    target.mkdir()
    for path in [*base.run.parent.glob("train.*"), *base.run.parent.glob("valid.*")]:
        shutil.copy(path, target)
    return str(target)


@pytest.fixture(scope="module")
def empty(base: Base, data: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    return run("empty_batches", base.root / "empty", data)


@pytest.mark.parametrize("layout", ["dp2", *(["tp2"] if WHOLE else []), "pp2", "distopt-overlap", "bf16"])
def test_a_step_without_targets_changes_nothing_and_has_no_loss(base: Base, empty: Any, layout: str) -> None:
    for results in empty[0]:
        code, by_empty, by_next = results[layout]
        assert code == 0 and by_empty == [] and by_next, "weight decay and moments rest in the one, not in the next"
    said = empty[1][layout]
    assert "Step 3 is skipped: no target in sequences 8 to 11 of " in said and "same-data/train counts" in said
    rows = base.rows(f"empty/{layout}")
    assert not {"loss", "grad_norm"} & set(rows[3]) and "learning_rate" in rows[3]
    assert [rows[s].get("skipped_no_targets") for s in (2, 3, 5)] == [None, 1, 1]
    assert [rows[s].get("empty_micro_batches") for s in (2, 3, 4, 5)] == [None, 4, 4, 5]
    tolerance = 0.02 if layout == "bf16" else 1e-4
    for step in (1, 2, 4, 5):
        assert rows[step]["loss"] == pytest.approx(base.rows("empty/dp2")[step]["loss"], abs=tolerance)
    assert "step 3/5 | tokens 192 | lr" in said, "the console shows no loss"
    last = load_state(folder.final(base.root / "empty" / layout / "checkpoints", 5))[0]
    assert (last.step, last.skipped, last.updates) == (5, 1, 4)


@pytest.fixture(scope="module")
def changed(base: Base, data: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    return run("changed_data", base.root / "changed", data)


def agreed(changed: Any, key: str) -> Any:
    """What both ranks say."""
    mine, other = (results[key] for results in changed[0])
    assert mine == other
    return mine


def losses(base: Base, name: str) -> list[float]:
    return [row["loss"] for row in base.rows(f"changed/{name}").values()]


def test_identities_are_in_the_run_folder_and_in_checkpoints(base: Base, changed: Any, data: str) -> None:
    assert agreed(changed, "whole") == 0
    stored = json.loads((base.root / "changed" / "whole" / "data.json").read_text())["datasets"]
    assert set(stored) == {f"{data}/train", f"{data}/valid"}
    assert stored[f"{data}/train"]["bin_bytes"] == 2 * (12 * 16 + 1)
    assert load_state(folder.final(base.root / "changed" / "whole" / "checkpoints", 3))[1].data == stored


def test_a_replaced_dataset_is_told_and_refused_later(base: Base, changed: Any) -> None:
    """The run keeps reading what it has opened; a later start needs to be told that the new one is meant."""
    run, path = base.root / "changed" / "replaced", f"{base.root}/changed/replaced-data/train"
    assert agreed(changed, "replaced") == 0
    said = changed[1]["replaced"]
    assert (
        said.count("warning: The dataset ") == 1 and f"{path} was changed during this run: its size of .bin is" in said
    )
    assert "the run continues with the files it has opened" in said and "(seen by rank 0 on " in said
    np.testing.assert_allclose(losses(base, "replaced")[:8], losses(base, "whole"), atol=1e-4)
    told = [r for r in read(run / "faults.jsonl") if r["event"] == "data_changed"]
    assert [r["step"] for r in told] == [6, 8]
    sentence = agreed(changed, "replaced-again")
    assert sentence.startswith(f"The dataset {path} is not the one that checkpoint {run}/checkpoints/step_00000008 was")
    assert sentence.endswith(f"continue with this one by setting data.accept_changed: [{path}].")
    assert agreed(changed, "replaced-accepted") == 0 and agreed(changed, "replaced-ever-after") == 0
    assert f"Warning: the dataset {path} differs from the one used up to this checkpoint (its size" in said
    stored = [load_state(folder.final(run / "checkpoints", step))[1].data[path] for step in (8, 10)]
    assert [s["bin_bytes"] for s in stored] == [386, 400], "each checkpoint names what it was trained on"


def test_a_deleted_dataset_is_told(base: Base, changed: Any) -> None:
    assert agreed(changed, "deleted") == 0
    assert "deleted-data/train.idx is gone; the run continues with the files" in changed[1]["deleted"]
    np.testing.assert_allclose(losses(base, "deleted"), losses(base, "whole"), atol=1e-4)


def test_a_dataset_that_is_cut_ends_the_run_and_loses_nothing(base: Base, changed: Any) -> None:
    sentence = agreed(changed, "cut")
    assert sentence.startswith("The run ends after step ") and ", which is saved; rank " in sentence
    assert "cut-data/train.bin: truncated while in use (it has 10 bytes, and had 386" in sentence
    step = int(sentence.split()[5].rstrip(","))
    assert step >= 4 and f"step_{step:08d}" in changed[1]["cut"], "the later start goes on from there"
    assert agreed(changed, "cut-again") == 0
    np.testing.assert_allclose(losses(base, "cut"), losses(base, "whole"), atol=1e-4)


def test_too_many_steps_without_targets_end_the_run_before_them(base: Base, changed: Any) -> None:
    sentence = agreed(changed, "starved")
    assert sentence.startswith("Steps 3 to 5 have no target that counts in the loss (data.loss_mask), more than ")
    assert "faults.max_without_targets = 2 in a row: sequences 8 to 19 of data.train, from " in sentence
    assert "starved-data/train; check" in sentence and sentence.endswith("up to step 2 is saved.")
    assert "Resuming from checkpoint " in changed[1]["starved"] and "step_00000002." in changed[1]["starved"]
    assert agreed(changed, "starved-again") == 0
    np.testing.assert_allclose(losses(base, "starved"), losses(base, "whole"), atol=1e-4)


def test_an_evaluation_without_targets_has_no_loss(base: Base, changed: Any) -> None:
    sentence = agreed(changed, "starved-valid")
    assert sentence.startswith(
        "2 evaluations in a row, up to that after step 2, have no target that counts in the loss"
    )
    assert "starved-data" not in sentence and "starved-valid-data/valid; use other validation data" in sentence
    rows = base.rows("changed/starved-valid")
    assert [row["empty_evaluations"] for row in rows.values()] == [1, 2]
    assert not any("validation_loss" in row for row in rows.values())
    assert list(folder.published(base.root / "changed" / "starved-valid" / "checkpoints")) == [2]


def test_checkpoints_of_earlier_versions_go_on(base: Base, changed: Any) -> None:
    assert agreed(changed, "earlier") == 0 and agreed(changed, "earlier-again") == 0
    assert "its lengths or checksums differ; restore" in agreed(changed, "earlier-changed")


def test_other_data_on_another_rank_are_refused(base: Base, changed: Any) -> None:
    sentence = agreed(changed, "other")
    assert (
        sentence.startswith("The dataset data/train on rank 1 on ") and "differs from the one on rank 0 on" in sentence
    )
    assert "its size of .bin is 400, not 386; give all nodes the same files." in sentence
    assert not (base.root / "changed" / "other" / "metrics.jsonl").exists()


@pytest.mark.parametrize("preflight", [False, True])
def test_other_data_on_another_node(base: Base, data: str, tmp_path: Path, preflight: bool) -> None:
    """One run folder, and under the name of the data a mount of the second node's own."""
    from megaponder.config.load import dump
    from tests.training.workers import config

    for name in ("data", "other"):
        shutil.copytree(data, tmp_path / name)
    shutil.copy(tmp_path / "other" / "valid.bin", tmp_path / "other" / "train.bin")
    shutil.copy(tmp_path / "other" / "valid.idx", tmp_path / "other" / "train.idx")
    dump(config(str(tmp_path / "run"), str(tmp_path / "data")), tmp_path / "run.yaml")
    workers = Workers(f"{HERE}:other_node", 2, {"root": str(tmp_path), "preflight": preflight})
    try:
        codes = workers.join(600)
        said = workers.output(0) + workers.output(1)
        if "no mount namespace" in said:
            pytest.skip("this process may not make a mount namespace")
        assert codes == [2, 2], said
        assert "its size of .bin is 400, not 386; give all nodes the same files." in said
        assert "rank 1 on " in said.lower() and "Traceback" not in said
    finally:
        workers.kill()
