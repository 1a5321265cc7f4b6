"""A thousand steps on two processes through thirty kills, freezes and full disks: the series of a run without any.

It takes minutes: MEGAPONDER_SOAK names the file that its report is written to, and lets it run.  MEGAPONDER_SOAK_SEED
draws other faults.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaponder.checkpoint import folder
from megaponder.checkpoint.damage import damage
from megaponder.monitor.jsonl import read
from tests.distributed import Workers
from tests.tolerance import ATOL, RTOL
from tests.training import datasets

STEPS, FAULTS = 1000, 30
REPORT = os.environ.get("MEGAPONDER_SOAK")
JOB: dict[str, Any] = {
    "train__steps": STEPS, "train__eval_every": 0, "train__eval_batches": 0, "schedule__warmup_fraction": 0.02,
    "optimizer__lr": 1e-3, "checkpoint__every": 20, "checkpoint__keep_last": 2, "checkpoint__asynchronous": True,
    "parallel__distributed_optimizer": True,
}  # fmt: skip
PATIENCE = {"hang": 8.0, "deadline": 10.0}


def start(root: Path, name: str) -> Workers:
    job = {"run": str(root / name), "data": str(root)} | JOB
    return Workers("tests.training.fault_workers:command", 2, PATIENCE | job)


def reached(run: Path) -> int:
    """The last step that the run has written a row of."""
    rows = read(run / "metrics.jsonl")
    return int(rows[-1]["step"]) if rows else 0


def printed(workers: Workers) -> str:
    """What rank 0 has printed, once it is there."""
    return workers.output(0) if (workers.folder / "out0.txt").exists() else ""


def wait_for(what: Any, workers: Workers, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not what() and None in workers.poll():
        assert time.monotonic() < end, workers.output()
        time.sleep(0.02)


def strike(kind: str, workers: Workers) -> None:
    """Do it, and wait until both processes have ended."""
    if kind == "kill both":
        workers.kill()
    elif kind == "kill one":
        os.kill(workers.pids[1], signal.SIGKILL)
    elif kind == "freeze one":
        os.kill(workers.pids[1], signal.SIGSTOP)
        wait_for(lambda: workers.poll()[0] is not None, workers, 200)
        os.kill(workers.pids[1], signal.SIGKILL)
    else:  # no file of theirs may grow beyond this any more
        for pid in workers.pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    wait_for(lambda: None not in workers.poll(), workers, 200)


EXPECTED = {"kill both": {-9}, "kill one": {-9, 69}, "freeze one": {-9, 69}, "full disk": {2, 69}}
"""Exit codes of the two processes."""


@pytest.mark.skipif(REPORT is None, reason="MEGAPONDER_SOAK is not set")
def test_a_run_through_thirty_faults_is_one_that_had_none(tmp_path: Path) -> None:
    seed = int(os.environ.get("MEGAPONDER_SOAK_SEED", "1"))
    dice, lines, began = random.Random(seed), [], time.monotonic()
    datasets.write(tmp_path / "train", tokens=4000, seed=1)
    datasets.write(tmp_path / "valid", tokens=200, seed=2)
    unbroken = start(tmp_path, "unbroken")
    assert unbroken.join(3000) == [0, 0], unbroken.output()

    run = tmp_path / "broken"
    root, newest, again = run / "checkpoints", 0, 0
    kinds = [list(EXPECTED)[i % len(EXPECTED)] for i in range(FAULTS)]
    dice.shuffle(kinds)
    for number, (step, kind) in enumerate(
        zip(sorted(dice.sample(range(1, STEPS - 40), FAULTS)), kinds, strict=True), 1
    ):
        workers = start(tmp_path, "broken")
        # without a launcher that ends it, a rank waits for one that is lost at the start until the groups' time-out
        while_starting = kind == "kill both" and dice.random() < 0.4
        if while_starting:
            time.sleep(dice.uniform(0.5, 3))
        else:
            wait_for(lambda w=workers: "| loss " in printed(w), workers, 300)
            wait_for(lambda s=step: reached(run) >= s, workers, 600)
            time.sleep(dice.uniform(0, 0.4))
        at = reached(run)
        strike(kind, workers)
        codes = workers.poll()
        assert set(codes) <= EXPECTED[kind], (kind, codes, workers.output())
        said = workers.output()
        assert "Traceback" not in said, said
        found = folder.published(root)
        assert all(damage(path) is None for path in found.values()), "every published checkpoint is whole"
        assert max(found, default=0) >= newest, "none is lost"
        newest = max(found, default=0)
        again += at - newest
        when = "while it starts" if while_starting else f"after step {at}"
        lines.append(f"| {number} | {kind} {when} | {', '.join(map(str, codes))} | {newest} |")
        workers.kill()

    last = start(tmp_path, "broken")
    assert last.join(3000) == [0, 0], last.output()
    assert not list(root.glob(".step_*")), "nothing is left behind"
    want, got = ({r["step"]: r for r in read(tmp_path / name / "metrics.jsonl")} for name in ("unbroken", "broken"))
    assert list(got) == list(want) == list(range(1, STEPS + 1))
    apart = {}
    for key in ("loss", "grad_norm"):
        one, other = (np.array([rows[s][key] for s in want]) for rows in (want, got))
        apart[key] = float(np.abs(other - one).max())
        np.testing.assert_allclose(other, one, RTOL, ATOL, err_msg=key)
    assert want[STEPS]["loss"] < want[1]["loss"]
    assert REPORT is not None
    Path(REPORT).write_text(
        f"""# Soak: {STEPS} steps on two processes through {FAULTS} faults (seed {seed})

    MEGAPONDER_SOAK=benchmarks/results/soak.md MEGAPONDER_SOAK_SEED={seed} pytest tests/training/test_soak.py

Two processes with the distributed optimizer, asynchronous checkpoints every {JOB["checkpoint__every"]} steps. The same
command is started again after each fault. Loss and gradient norm are compared, step by step, with those of a run that
had none. Largest differences: {apart["loss"]:.1e} and {apart["grad_norm"]:.1e}.
The loss is {want[1]["loss"]:.4f} at first and {want[STEPS]["loss"]:.4f} at the end.
Steps made again: {again}. After each fault all published checkpoints were
whole, and none was lost. Seconds: {time.monotonic() - began:.0f}.

| fault | what | exit codes | newest checkpoint |
|---|---|---|---|
"""
        + "\n".join(lines)
        + "\n"
    )
