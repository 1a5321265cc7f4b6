"""Resume = never stopped: on the same layout to the bit, on every other one to fp32 tolerance."""

from __future__ import annotations

import random
import shutil
import signal
import time

import numpy as np
import pytest
import torch

from megaponder.checkpoint import folder, manifest, reader
from megaponder.checkpoint.weights import load_weights
from tests.distributed import Workers
from tests.layouts.cases import WHOLE
from tests.tolerance import ATOL, RTOL
from tests.training import datasets
from tests.training.conftest import HERE, Base, run

SERIES = ("loss", "grad_norm", "validation_loss", "learning_rate", "sequences", "tokens", "needed_flops",
          "executed_flops")  # fmt: skip

# name -> changes; all of them on two processes, from a checkpoint that one process wrote
LAYOUTS: dict[str, dict[str, object]] = {
    "tp2-sp": {"parallel__tensor": 2, "parallel__sequence": True},
    "pp2": {"parallel__pipeline": 2},
    "cp2": {"parallel__context": 2},
    "dp2-async": {"checkpoint__asynchronous": True},
    "dp2-distopt-overlap-async": {
        "parallel__distributed_optimizer": True,
        "parallel__overlap_grad_reduce": True,
        "parallel__overlap_param_gather": True,
        "checkpoint__asynchronous": True,
    },
}
if WHOLE:
    LAYOUTS |= {"tp2": {"parallel__tensor": 2}, "dp2": {}, "dp2-distopt": {"parallel__distributed_optimizer": True}}


def series(rows: dict[int, dict], steps: range = range(1, 9)) -> dict[str, list[float]]:
    return {name: [rows[s][name] for s in steps if name in rows[s]] for name in SERIES}


def assert_overlays(base: Base, name: str, exact: bool = False) -> None:
    want, got = series(base.rows()), series(base.rows(name))
    for key in SERIES:
        if exact:
            assert got[key] == want[key], key
        else:
            np.testing.assert_allclose(got[key], want[key], RTOL, ATOL, err_msg=f"{name}: {key}")


def test_the_uninterrupted_run_is_what_the_others_rely_on(base: Base):
    rows = base.rows()
    assert list(rows) == list(range(1, 9)) and rows[8]["sequences"] == 32 and rows[8]["tokens"] == 512
    assert [s for s in rows if "validation_loss" in rows[s]] == [4, 8]
    assert list(folder.published(base.run / "checkpoints")) == [8, 6, 3]
    assert base.output.count("| loss ") == 8
    assert (base.run / "config.yaml").is_file() and not (base.run / "lock.json").exists()


def test_same_layout_is_exact_right_at_an_epochs_edge(base: Base):
    late = {"checkpoint__asynchronous": True, "checkpoint__every": 1}
    jobs = [base.copy("same"), base.copy("same-late", upto=6) | late]
    _, output = run("run_many", 1, jobs=jobs)
    for name in ("same", "same-late"):
        assert_overlays(base, name, exact=True)
    assert "Resuming from checkpoint" in output and "step_00000003" in output
    assert "5 rows beyond step 3 were moved" in output
    assert len((base.root / "same" / "metrics.superseded.jsonl").read_text().splitlines()) == 5
    weights = [load_weights(base.root / n / "checkpoints" / "step_00000008")[1] for n in ("whole", "same", "same-late")]
    for name, tensor in weights[0].items():
        assert all((other[name] == tensor).all() for other in weights[1:]), name
    assert_moving_average(base, "same-late", 6)


def assert_moving_average(base: Base, name: str, step: int, dtype: str = "") -> None:
    """The average of a checkpoint follows from that of the step before and the weights, the FP32 ones."""
    before, after = (everything(folder.final(base.root / name / "checkpoints", s)) for s in (step, step + 1))
    names = [n.removeprefix("optimizer.ema.") for n in after if n.startswith("optimizer.ema.")]
    assert sorted(names) == sorted(n for n in after if not n.startswith(reader.BESIDES))
    for n in names:
        weight = after[f"optimizer.state.param.{n}"] if dtype == "bf16" else after[n]
        want = 0.75 * before[f"optimizer.ema.{n}"].astype(np.float64) + 0.25 * weight.astype(np.float64)
        np.testing.assert_allclose(after[f"optimizer.ema.{n}"], want, rtol=1e-6, atol=1e-9, err_msg=n)
        assert (after[f"optimizer.ema.{n}"] != weight).any(), n


def test_another_batch_goes_on_behind_what_was_consumed(base: Base):
    """Also where the batch that is now would not have needed as many sequences as were consumed."""
    ways: dict[str, dict] = {
        "smaller": {"train__global_batch": 1, "train__micro_batch": 1},
        "larger": {"train__global_batch": 8},
        "ramped": {"train__batch_rampup": [1, 1, 30], "train__micro_batch": 1},
    }
    jobs = [base.copy(f"batch-{name}", upto=6) | changes for name, changes in ways.items()]
    _, output = run("run_many", 1, jobs=jobs)
    assert "Warning: train.global_batch was 4 up to this checkpoint and is 1 from here on." in output
    for name, last in (("smaller", 26), ("larger", 40), ("ramped", 30)):
        rows = base.rows(f"batch-{name}")
        assert rows[6]["sequences"] == 24 and rows[8]["sequences"] == last, name
        assert np.isfinite(rows[8]["loss"])


def test_a_budget_of_tokens_counts_what_earlier_batches_were(base: Base):
    """384 of 512 tokens are done; eight sequences of 16 tokens a step leave one step."""
    tokens = {"train__tokens": 512, "train__steps": None, "train__global_batch": 8}
    _, output = run("run_many", 1, jobs=[base.copy("tokens", upto=6) | tokens])
    rows = base.rows("tokens")
    assert "Warning: train.tokens was None up to this checkpoint and is 512 from here on." in output
    assert "Warning: train.steps" not in output
    assert max(rows) == 7 and rows[7]["tokens"] == 512 and rows[7]["total_steps"] == 7
    assert "step 7/7" in output


@pytest.fixture(scope="module")
def resharded(base: Base) -> str:
    """All layouts of LAYOUTS, continued from the one-process checkpoint of step 3; returns what they printed."""
    jobs = [base.copy(n) | changes for n, changes in LAYOUTS.items()]
    halves = evaluated(base, "evaluated-pp2") | {"parallel__pipeline": 2, "ponder__skip_halted": True}
    return run("run_many", 2, jobs=[*jobs, halves])[1]


def evaluated(base: Base, name: str) -> dict[str, object]:
    """Two steps of a model whose tokens may halt, with two sets of held-out data and the loss after each pass."""
    sets = {"held": [f"{base.data}/valid"], "seen": [f"{base.data}/train"]}
    return {
        "run": str(base.root / name), "data": base.data, "data__valid": sets, "train__steps": 2,
        "ponder__method": "adaponderlm", "ponder__options": {"steps": 2, "target": 0.0}, "train__eval_depths_every": 2,
    }  # fmt: skip


def test_named_sets_and_every_depth_in_an_evaluation(base: Base, resharded: str):
    run("run_many", 1, jobs=[evaluated(base, "evaluated")])
    one, two = (base.rows(name)[2] for name in ("evaluated", "evaluated-pp2"))
    losses = [name for name in one if name.startswith(("validation_loss", "ponder_valid_loss_pass"))]
    assert losses == [
        "validation_loss", "validation_loss_held", "validation_loss_seen",
        *(f"ponder_valid_loss_pass{k}" for k in range(3)),
    ]  # fmt: skip
    np.testing.assert_allclose([two[n] for n in losses], [one[n] for n in losses], RTOL, ATOL)
    assert min(one["validation_loss_held"], one["validation_loss_seen"]) < one["validation_loss"]
    assert max(one["validation_loss_held"], one["validation_loss_seen"]) > one["validation_loss"]
    # all gates are open at the start: the model's own depth is the last pass
    assert one["ponder_valid_loss_pass2"] == pytest.approx(one["validation_loss"], rel=1e-6)
    assert abs(one["ponder_valid_loss_pass0"] - one["validation_loss"]) > 1e-4


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout_continues_the_series(base: Base, resharded: str, name: str):
    assert_overlays(base, name)
    part = "".join(resharded.split("== ")[1:])
    assert part.count("step 8/8") == len(LAYOUTS), "the loss is printed by exactly one rank of each layout"


def test_one_process_continues_what_any_layout_saved(base: Base, resharded: str):
    names = [f"back-from-{n}" for n in LAYOUTS]
    run("run_many", 1, jobs=[base.copy(f"back-from-{n}", source=n, upto=6) for n in LAYOUTS])
    for name in names:
        assert_overlays(base, name)


def test_bf16_keeps_its_master_weights(base: Base):
    bf16 = {"precision__dtype": "bf16"}
    run("run_many", 1, jobs=[{"run": str(base.root / "bf16"), "data": base.data} | bf16])
    run("run_many", 1, jobs=[base.copy("bf16-same", source="bf16") | bf16 | {"checkpoint__every": 1}])
    assert_moving_average(base, "bf16-same", 4, "bf16")
    assert series(base.rows("bf16-same")) == series(base.rows("bf16"))
    distributed = bf16 | {"parallel__distributed_optimizer": True}
    run("run_many", 2, jobs=[base.copy("bf16-distopt", source="bf16") | distributed | {"checkpoint__every": 1}])
    assert_moving_average(base, "bf16-distopt", 4, "bf16")
    run("run_many", 1, jobs=[base.copy("bf16-back", source="bf16-distopt", upto=6) | bf16])
    # masters become the parameters of an FP32 run, and the parameters of one become masters
    run("run_many", 1, jobs=[base.copy("bf16-to-fp32", source="bf16"), base.copy("fp32-to-bf16") | bf16])
    assert {t.dtype for t in load_weights(base.root / "bf16-to-fp32")[1].values()} == {torch.float32}
    for name in ("bf16-distopt", "bf16-back", "bf16-to-fp32", "fp32-to-bf16"):  # rounded to 8 bits on different ways
        np.testing.assert_allclose(
            series(base.rows(name))["loss"], series(base.rows("bf16"))["loss"], rtol=2e-3, err_msg=name
        )


def test_a_vocabulary_mixture_and_its_copy_of_the_table(base: Base):
    method = {"ponder__method": "ponderlm", "model__tie_embeddings": False}
    run("run_many", 1, jobs=[{"run": str(base.root / "mixture"), "data": base.data} | method])
    run("run_many", 2, jobs=[base.copy("mixture-pp2", source="mixture") | method | {"parallel__pipeline": 2}])
    run("run_many", 1, jobs=[base.copy("mixture-back", source="mixture-pp2", upto=6) | method])
    for name in ("mixture-pp2", "mixture-back"):
        np.testing.assert_allclose(
            series(base.rows(name))["loss"], series(base.rows("mixture"))["loss"], RTOL, ATOL, err_msg=name
        )


def test_weights_load_without_a_launcher_from_any_layout(base: Base, resharded: str):
    cfg, whole = load_weights(base.run)
    assert cfg.model.num_layers == 2 and cfg.run == str(base.run)
    own = run("weights_of", 1, checkpoint=str(base.run / "checkpoints" / "step_00000008"), run="x", data=base.data)[0][
        0
    ]
    assert set(own) == set(whole)
    for name, tensor in own.items():
        assert (tensor == whole[name]).all(), name
    for layout in ("tp2-sp", "pp2", "dp2-distopt-overlap-async"):
        _, other = load_weights(base.root / layout / "checkpoints" / "step_00000008")
        assert set(other) == set(whole)
        for name, tensor in whole.items():
            np.testing.assert_allclose(other[name], tensor, rtol=1e-3, atol=1e-5, err_msg=f"{layout}: {name}")


def everything(path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint but the random states."""
    names = {n: m for n, m in reader.tensors(path).items() if not n.startswith("random.")}
    return {n: t.float().numpy() for n, t in reader.read(path, names).items()}


def test_every_moment_survives_every_layout(base: Base, resharded: str):
    whole = everything(folder.final(base.run / "checkpoints", 6))
    for prefix in ("state.exp_avg_sq.", "ema."):  # beside the other moments and the parameters
        assert sum(n.startswith(f"optimizer.{prefix}") for n in whole) == len(whole) // 4
    for layout in LAYOUTS:
        other = everything(folder.final(base.root / layout / "checkpoints", 6))
        assert set(other) == set(whole), layout
        for name, tensor in whole.items():
            np.testing.assert_allclose(other[name], tensor, rtol=1e-3, atol=1e-5, err_msg=f"{layout}: {name}")


@pytest.mark.parametrize("world", [1, 2])
def test_an_asynchronous_save_is_a_copy(base: Base, world: int):
    name = f"copy-{world}"
    job = {"run": str(base.root / name), "data": base.data, "train__steps": 4, "checkpoint__asynchronous": True}
    job |= {"parallel__distributed_optimizer": True} if world == 2 else {}
    job |= {"schedule__warmup_fraction": 0.4, "schedule__kind": "constant"}
    run("spoil_after_async_save", world, at_step=3, **job)
    clean = job | {"run": str(base.root / f"clean-{world}"), "checkpoint__asynchronous": False}
    run("run_train", world, **clean)
    saved, want = (everything(folder.final(base.root / f"{n}-{world}" / "checkpoints", 3)) for n in ("copy", "clean"))
    for key, tensor in want.items():
        np.testing.assert_array_equal(saved[key], tensor, err_msg=key)


@pytest.mark.parametrize("world", [1, 2])
def test_kill_9_at_any_moment_loses_no_whole_checkpoint(base: Base, world: int):
    dice, name = random.Random(world), f"killed-{world}"
    options: dict[str, object] = {"checkpoint__every": 1, "checkpoint__asynchronous": world == 2}
    options |= {"parallel__distributed_optimizer": True} if world == 2 else {}
    job = {"run": str(base.root / name), "data": base.data} | options
    root, reached = base.root / name / "checkpoints", 0
    for kill in range(4):
        workers = Workers(f"{HERE}:run_train", world, job)
        deadline = time.monotonic() + 600
        while max(folder.published(root), default=0) < min(7, reached + kill % 2) and time.monotonic() < deadline:
            time.sleep(0.005)  # wait for a step, every second time; otherwise strike while starting
        time.sleep(dice.uniform(0, 0.5))
        workers.kill()
        found = folder.published(root)
        assert all(manifest.damage(p) is None for p in found.values())
        assert max(found, default=0) >= reached, "a published checkpoint is never lost"
        reached = max(found, default=0)
    run("run_train", world, **job)
    assert reached > 0
    assert_overlays(base, name, exact=world == 1)


def test_another_path_is_told_and_another_dataset_under_it_is_refused(base: Base):
    """The second has the lengths of the first; only its tokens differ."""
    job = base.copy("replaced")
    data = base.root / "replaced-data"
    data.mkdir()
    for path in [*base.run.parent.glob("train.*"), *base.run.parent.glob("valid.*")]:
        shutil.copy(path, data)
    job |= {"data": str(data), "checkpoint__every": 0}
    _, output = run("run_train", 1, **job | {"train__steps": 4})
    assert "differs from the one" not in output and "Warning: data.train was" in output  # another path
    datasets.write(data / "train", tokens=12 * 16 + 1, seed=9)
    (found,), _ = run("refusals", 1, jobs=[job | {"train__steps": 5}])
    assert (
        found[0].startswith(f"The dataset {data}/train is not the one that checkpoint ")
        and "data/valid" not in found[0]
    )
    job |= {"data__accept_changed": [f"{data}/train"]}
    _, output = run("run_train", 1, **job | {"train__steps": 5})
    assert f"Warning: the dataset {data}/train differs from the one used up to this checkpoint" in output
    assert f"dataset {data}/valid" not in output and "Warning: train.steps was 4 up to this checkpoint" in output
    _, output = run("run_train", 1, **job | {"train__steps": 5})
    assert "There is nothing to do: 5 steps are done, which is the whole budget of 5." in output


@pytest.mark.parametrize("number", [signal.SIGTERM, *([signal.SIGINT] if WHOLE else [])])
def test_a_signal_to_one_rank_saves_and_stops_all(base: Base, number: int):
    name = f"stopped-{number}"
    job = {"run": str(base.root / name), "data": base.data, "parallel__pipeline": 2}
    codes, output = run("run_and_signal", 2, at_step=5, number=number, rank=0, **job)
    assert codes == [128 + number] * 2
    assert f"Stopped by {signal.Signals(number).name} after step 5; it is saved." in output
    assert list(folder.published(base.root / name / "checkpoints")) == [5, 3]
    run("run_train", 2, **job)
    assert_overlays(base, name)


BUDGET = {
    "ponder__method": "adaponderlm",
    "ponder__options": {"steps": 2, "target": 0.6, "explore": 0.5, "ramp_start": 1, "ramp_end": 6},
}


def test_a_budget_goes_on_in_the_middle_of_its_ramp(base: Base):
    """The threshold and what it follows are in the checkpoint, on every layout."""

    def assert_same(name: str, exact: bool) -> None:
        want, got = base.rows("budget"), base.rows(name)
        for key in (*SERIES, "ponder_wanted_depth", "ponder_price_of_a_pass", "ponder_valid_mean_depth"):
            if key == "executed_flops" and name.endswith("skip"):
                continue  # halted tokens are left out there, and only masked in the run before
            a, b = ([rows[s][key] for s in range(4, 9) if key in rows[s]] for rows in (want, got))
            assert len(set(a)) > 1 or key not in ("ponder_wanted_depth", "ponder_price_of_a_pass"), key
            np.testing.assert_allclose(b, a, 0 if exact else RTOL, 0 if exact else ATOL, err_msg=f"{name}: {key}")

    skipping = BUDGET | {"ponder__skip_halted": True}
    first = {"run": str(base.root / "budget"), "data": base.data} | BUDGET
    # one row, at the end, and the published gates, which have not moved yet: all tokens run all passes
    paper = {"run": str(base.root / "paper"), "data": base.data, "ponder__method": "adaponderlm"}
    paper |= {
        "ponder__options": {"steps": 3, "target": 0.0, "bottom_share": 0.5},
        "train__steps": 2,
        "logging__every": 1000,
    }
    _, said = run("run_many", 1, jobs=[first, paper])
    assert "warning: Over the last 200 steps a token ran 4.00 passes on average; the budget is 2.00" in said
    assert "ponder_valid_loss_at_random" not in base.rows("paper")[2]  # every token runs as many passes as any other
    run("run_many", 1, jobs=[base.copy("budget-same", source="budget") | BUDGET])
    assert_same("budget-same", exact=True)
    layouts: dict[str, dict[str, object]] = {
        "budget-pp2": {"parallel__pipeline": 2},
        "budget-distopt-skip": skipping | LAYOUTS["dp2-distopt-overlap-async"],
    } | ({"budget-tp2-sp": LAYOUTS["tp2-sp"]} if WHOLE else {})
    run("run_many", 2, jobs=[base.copy(n, source="budget") | BUDGET | changes for n, changes in layouts.items()])
    for name in layouts:
        assert_same(name, exact=False)
