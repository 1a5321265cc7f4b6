"""Faults, injected one by one: what the run says, what it keeps, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.flight_recorder.components.loader import read_dump

from megaponder.checkpoint import folder, manifest
from megaponder.checkpoint.state import load_state
from megaponder.monitor.jsonl import read
from megaponder.training.fault_record import past
from megaponder.training.faults import is_spike
from megaponder.training.stragglers import slowest
from tests.distributed import Workers, free_port
from tests.layouts.cases import WHOLE
from tests.training.conftest import Base
from tests.training.test_resume import assert_overlays

HERE = "tests.training.fault_workers"


def run(target: str, world: int, **args: Any) -> tuple[list[Any], str]:
    workers = Workers(f"{HERE}:{target}", world, args)
    try:
        return workers.wait(1500), "".join(workers.output(r) for r in range(world))
    finally:
        workers.kill()


@pytest.fixture(scope="module")
def one(base: Base) -> tuple[dict[str, Any], dict[str, str]]:
    """Results and printed text of every job of `one_process`."""
    (results,), output = run("one_process", 1, root=str(base.root / "one"), data=base.data)
    texts: dict[str, str] = {}
    for part in output.split("== ")[1:]:
        path, _, text = part.partition("\n")
        name = path.rpartition("/")[2]
        texts[name] = texts.get(name, "") + text
    return results, texts


def events(run: Path) -> list[dict[str, Any]]:
    return read(run / "faults.jsonl")


def steps(run: Path) -> list[int]:
    """Published checkpoints, all of which must be whole."""
    found = folder.published(run / "checkpoints")
    assert all(manifest.damage(path) is None for path in found.values())
    return list(found)


def test_a_rolled_back_run_is_one_that_never_failed(base: Base, one: Any) -> None:
    results, texts = one
    assert results["rolled-back"] == 0
    assert "Step 5 is skipped: its gradient norm is nan. Skipped so far: 1." in texts["rolled-back"]
    assert "Steps 5 to 6 were skipped in a row: back to the checkpoint of step 3." in texts["rolled-back"]
    rows = base.rows("one/rolled-back")
    for key in ("loss", "grad_norm", "validation_loss", "learning_rate", "sequences"):
        assert [rows[s].get(key) for s in rows] == [row.get(key) for row in base.rows().values()], key
    found = events(base.root / "one" / "rolled-back")
    assert [e["event"] for e in found] == ["skipped", "skipped", "rolled_back"]
    assert found[0]["grad_norm"] is None and found[0]["sequences"] == [16, 20]
    assert found[2]["sequences"] == [16, 24] and found[2]["to_step"] == 3


def test_the_data_of_skipped_steps_are_left_out(base: Base, one: Any) -> None:
    results, texts = one
    assert results["left-out"] == 0
    assert "sequences 16 to 23 are skipped from now on" in texts["left-out"]
    rows = base.rows("one/left-out")  # the later start, which went through the window once more
    assert [rows[s]["sequences"] for s in (4, 5, 8)] == [16, 28, 40]
    assert rows[4]["loss"] == base.rows()[4]["loss"]
    assert load_state(folder.final(base.root / "one" / "left-out" / "checkpoints", 8))[0].sequences == 40


def test_going_back_in_vain_ends(base: Base, one: Any) -> None:
    sentence = one[0]["in-vain"]
    assert "Steps 5 to 6 were skipped in a row" in sentence and "faults.max_rollbacks = 1" in sentence
    assert "sequences 16 to 23" in sentence
    assert steps(base.root / "one" / "in-vain") == [3]


def test_a_spike_is_skipped_and_the_last_losses_survive_a_restart(base: Base, one: Any) -> None:
    results, texts = one
    assert results["spike"] == 0
    assert "Step 6 is skipped: its loss" in texts["spike"] and "standard deviations above the mean" in texts["spike"]
    run = base.root / "one" / "spike"
    assert steps(run) == [9, 8], "none is written while a step is skipped"
    before, after = (load_state(folder.final(run / "checkpoints", step))[0] for step in (8, 9))
    assert before.skipped == after.skipped == 1 and before.updates == 7
    assert after.losses[:-1] == before.losses[-7:] and len(after.norms) == 8


def test_a_signal_in_an_evaluation_saves_and_the_next_start_does_the_evaluation(base: Base, one: Any) -> None:
    results, texts = one
    assert "Stopped by SIGUSR1 after step 4; it is saved." in texts["evaluation"]
    assert results["evaluation-first"] == 75 and results["evaluation"] == 0
    root = base.root / "one" / "evaluation" / "checkpoints"
    assert [load_state(folder.final(root, step))[0].evaluation_due for step in (4, 8)] == [True, False]
    assert_overlays(base, "one/evaluation", exact=True)
    assert set(base.rows("one/evaluation")[4]) >= set(base.rows()[4]) - {"checkpoint_seconds", "checkpoint_bytes"}


def test_a_signal_in_the_last_evaluation_is_no_end(base: Base, one: Any) -> None:
    """A launcher would take an exit code of 0 for the end, and nobody would do the evaluation."""
    results, texts = one
    assert results["evaluation-last-first"] == 75 and results["evaluation-last"] == 0
    assert "Stopped by SIGUSR1 after step 4; it is saved." in texts["evaluation-last"]
    assert list(base.rows("one/evaluation-last")) == [1, 2, 3, 4]
    assert "validation_loss" in base.rows("one/evaluation-last")[4]


def test_a_signal_while_data_stall_saves(base: Base, one: Any) -> None:
    assert one[0]["stall"] == 75 and "Stopped by SIGUSR2 after step 4" in one[1]["stall"]
    assert steps(base.root / "one" / "stall")[0] == 4


def test_the_stop_file_saves_and_is_removed(base: Base, one: Any) -> None:
    run = base.root / "one" / "stop-file"
    assert one[0]["stop-file"] == 0 and "Stopped by the file STOP after step 5" in one[1]["stop-file"]
    assert steps(run) == [5, 3] and not (run / "STOP").exists()


def test_a_full_disk_is_a_sentence(base: Base, one: Any) -> None:
    assert "The checkpoint could not be written to" in one[0]["full-disk"], one
    assert "earlier ones, if any, are intact" in one[0]["full-disk"] and "Traceback" not in one[1]["full-disk"]
    assert " GB are free there" in one[0]["full-disk"]
    assert ".distcp: File too large; " in one[0]["full-disk"], "PyTorch's own error names neither file nor reason"
    assert steps(base.root / "one" / "full-disk") == [3]
    assert not list((base.root / "one" / "full-disk" / "checkpoints").glob(".step_*")), "the room is given back"
    metrics = base.root / "one" / "full-metrics" / "metrics.jsonl"
    assert one[0]["full-metrics"].startswith(f"{metrics} could not be written to (File too large)")
    assert "Traceback" not in one[1]["full-metrics"]


@pytest.fixture(scope="module")
def two(base: Base) -> tuple[list[dict[str, Any]], str]:
    return run("two_processes", 2, root=str(base.root / "two"), data=base.data)


@pytest.mark.parametrize("layout", ["pp2", "bf16", "distopt-overlap"])
def test_a_skipped_step_changes_no_bit_on_any_rank(two: Any, layout: str) -> None:
    for results in two[0]:
        assert results[f"skip-{layout}"] == 0
        assert results[f"changed-{layout}-3"] == []
        assert results[f"changed-{layout}-4"], "the next step is taken"


def test_a_slow_rank_is_reported(two: Any, base: Base) -> None:
    assert "warning: rank 1 is slow: " in two[1] and "times the median of the others" in two[1]
    rows = read(base.root / "two" / "slow" / "metrics.jsonl")
    assert rows and all(row["straggler_slowdown"] > 1.25 for row in rows)


def test_the_rank_that_the_others_wait_for_is_named(base: Base, two: Any) -> None:
    assert [r["stalled"] for r in two[0]] == [0, 0], "it was only slow: nobody ends"
    run = base.root / "two" / "stalled"  # a slow machine may stand still before and after that, too
    named = re.compile(r"the others wait for rank 1 on \S+, in data of step 3")
    assert any(e["event"] == "hang" and e["step"] == 3 and named.fullmatch(e["blame"]) for e in events(run))
    assert any(x.startswith("warning: no progress") and named.search(x) for x in two[1].splitlines())
    stacks = [(run / "stacks-then" / f"0000{r}.txt").read_text() for r in (0, 1)]
    assert "agreed" in stacks[0] and "wait" in stacks[1]
    written = [run / "stacks" / f"collectives_{r}" for r in (0, 1)]
    recorded = [read_dump("collectives_", str(path)) for path in written]
    assert [r["rank"] for r in recorded] == [0, 1]
    assert all(r["entries"][-1]["profiling_name"].startswith("gloo:") for r in recorded)


@pytest.mark.parametrize(("number", "words"), [(signal.SIGSTOP, "has not reported for"), (signal.SIGKILL, "has ended")])
def test_a_lost_rank_ends_the_others_with_a_sentence(base: Base, number: int, words: str) -> None:
    path = base.root / f"lost-{number}"
    job = {"run": str(path), "data": base.data, "train__steps": 3000, "train__eval_batches": 0}
    workers = Workers(f"{HERE}:command", 2, {"hang": 15.0, "deadline": 30.0, "checkpoint__every": 0} | job)
    try:
        _until(lambda: len(read(path / "metrics.jsonl")) > 2, 600, workers)
        os.kill(workers.pids[1], number)
        begin = time.monotonic()
        _until(lambda: workers.poll()[0] is not None, 500, workers)
        assert workers.poll()[0] == 69, workers.output()
        said = workers.output(0)
        assert "error: Rank 0 " in said and "rank 1 on " in said and words in said and "Traceback" not in said
        assert (base.root / f"lost-{number}.exit").read_text() == "69\n"
        if number == signal.SIGSTOP:
            assert time.monotonic() - begin < 300, "sooner than the process group's time-out"
            assert "warning: no progress" in said and (path / "stacks" / "00000.txt").exists()
    finally:
        workers.kill()


@pytest.mark.parametrize(
    ("fault", "words"),
    [("left out", "rank 1 on ")] + WHOLE * [("late", "all 2 ranks are in forward_backward of step 3 and alive")],
)
def test_a_collective_that_one_rank_does_not_enter(base: Base, fault: str, words: str) -> None:
    """Left out, the next one does not match and gloo ends that rank; late, the process group's time-out ends all."""
    path = base.root / f"collective-{fault[:4]}"
    job = {"run": str(path), "data": base.data, "train__eval_batches": 0, "checkpoint__every": 2}
    job["parallel__timeout_minutes"] = 0.25 if fault == "late" else 5.0
    workers = Workers(f"{HERE}:command", 2, {"hang": 4.0, "deadline": 1000.0, "fault": fault} | job)
    try:
        _until(lambda: workers.poll()[0] is not None, 600, workers)
        said = workers.output(0)
        assert workers.poll()[0] == 69 and "Traceback" not in said, workers.output()
        assert "error: Rank 0 lost another rank in forward_backward of step 3: " in said and words in said
        if fault == "left out":
            assert "collective mismatch" in workers.output(1)
        else:
            assert "warning: no progress for " in said
        assert steps(path) == [2]
    finally:
        workers.kill()


def _until(holds: Any, seconds: float, workers: Workers) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, workers.output()
        time.sleep(0.1)


def test_spikes_and_windows() -> None:
    level = [2.0, 2.1, 1.9, 2.0]
    assert is_spike(2.6, level, 8, 6.0) and not is_spike(2.3, level, 8, 6.0)
    assert not is_spike(99.0, level, 10, 6.0), "too few values to tell"
    assert not is_spike(0.1, level, 8, 6.0), "only upwards"
    begins = {first: past([(16, 24), (28, 30)], first, 4) for first in (8, 12, 13, 16, 23, 24, 25)}
    assert begins == {8: 8, 12: 12, 13: 24, 16: 24, 23: 24, 24: 24, 25: 30}


def test_stragglers_by_node() -> None:
    places = ["a", "a", "b", "b", "c", "c"]
    even = [[0.1, 1.0]] * 6
    level = slowest(places, even)
    assert level is not None and level.slowdown == 1.0
    assert slowest(["a"], [[9.0, 9.0]]) is None
    found = slowest(places, [*even[:3], [2.1, 1.0], *even[4:]])
    assert found is not None and found.slowdown == pytest.approx(3.1 / 1.1)
    assert found.sentence().startswith("b is slow: 3.1 s of its own per step (data 2.1, compute 1), 2.82 times")


def test_the_record_is_plain_json(tmp_path: Path) -> None:
    from megaponder.training.fault_record import write

    write(tmp_path / "faults.jsonl", "skipped", step=3, loss=float("inf"), grad_norm=1.5)
    row = json.loads((tmp_path / "faults.jsonl").read_text())
    assert row["loss"] is None and row["grad_norm"] == 1.5 and row["step"] == 3


@pytest.fixture(scope="module")
def before(base: Base) -> list[list[str | None]]:
    ports = [free_port() for _ in range(3)]
    job = {"run": str(base.root / "not-there"), "data": base.data}
    results, output = run("checks_before", 2, ports=ports, **job)
    assert "ranks 0 to 1; no GPU; torch" in output and "2 of 2 ranks on 1 nodes have reported." in output
    return results


def test_the_preflight_names_what_is_different_and_who_is_absent(before: list[list[str | None]]) -> None:
    assert [r[0] for r in before] == [None, None]
    assert before[0][1] == before[1][1] and "in configuration" in str(before[0][1])
    assert str(before[0][2]).startswith("Rank 1 of 2 did not report within 300 s (")


def test_process_groups_that_do_not_end_are_left(base: Base) -> None:
    """As NCCL's do while a captured graph holds calls of them; the run is over, and its last checkpoint is whole."""
    job = {"run": str(base.root / "never-leaves"), "data": base.data, "train__steps": 2, "train__eval_batches": 0}
    workers = Workers(f"{HERE}:never_leaves", 2, job)
    try:
        assert workers.join(600) == [0, 0]
        assert all("the process groups did not shut down within" in workers.output(rank) for rank in range(2))
    finally:
        workers.kill()
    assert steps(base.root / "never-leaves") == [2]
