"""Faults of ranks over NCCL: who hangs leaves its last collectives, and errors and hangs cost no process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.flight_recorder.components.loader import read_dump

from megaponder.monitor.jsonl import read
from tests.distributed import Workers
from tests.gpu.test_resume import FP32, losses
from tests.tolerance import ATOL, RTOL
from tests.training import datasets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

JOB: dict[str, Any] = FP32 | {"parallel__distributed_optimizer": True, "train__eval_batches": 0}
HERE = "tests.training.fault_workers"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    datasets.write(root / "train", tokens=12 * 16 + 1, seed=1)
    datasets.write(root / "valid", tokens=200, seed=2)
    return root


@pytest.fixture(scope="module")
def whole(data: Path) -> list[float]:
    """Losses of a run in which nothing happens."""
    workers = Workers("tests.training.workers:run_train", 2, {"run": str(data / "whole"), "data": str(data)} | JOB)
    try:
        assert workers.wait(120) == [0, 0]
    finally:
        workers.kill()
    return losses(data, "whole")


@pytest.mark.parametrize("fault", ["error", "hangs"])
def test_a_fault_on_a_rank_costs_no_process(data: Path, whole: list[float], fault: str) -> None:
    """In step 5, behind the checkpoint of step 3; ranks that wait in NCCL are freed."""
    pytest.importorskip("nvidia_resiliency_ext.inprocess")
    limits = {"faults__in_process_restarts": 1, "faults__hang_minutes": 0.5, "parallel__timeout_minutes": 3.0}
    job = {"run": str(data / fault), "data": str(data)} | JOB | limits
    workers = Workers(f"{HERE}:restarted", 2, {"fault": fault, "at_step": 5} | job)
    try:
        assert workers.wait(180) == [0, 0], workers.output()
    finally:
        workers.kill()
    assert workers.output(0).count("Restart 1 of 1 within the processes.") == 1
    assert [r["event"] for r in read(data / fault / "faults.jsonl")][-1] == "restart"
    np.testing.assert_allclose(losses(data, fault), whole, RTOL, ATOL)


@pytest.mark.parametrize("writer", ["heartbeat", "watchdog"])
def test_who_hangs_leaves_its_last_collectives(data: Path, writer: str) -> None:
    """Rank 1 does not enter the reduction of step 3: the ranks see it themselves, or NCCL's watchdog ends them."""
    hang, minutes = (6.0, 3.0) if writer == "heartbeat" else (1000.0, 0.5)
    run, job = data / writer, {"run": str(data / writer), "data": str(data), "parallel__timeout_minutes": minutes} | JOB
    workers = Workers(f"{HERE}:command", 2, {"hang": hang, "deadline": 2000.0, "fault": "late"} | job)
    end = time.monotonic() + 150
    try:
        while time.monotonic() < end and workers.poll()[0] is None:
            if writer == "heartbeat" and "warning: no progress" in workers.output(0):
                break
            time.sleep(0.2)
        said, codes = workers.output(0), workers.poll()
    finally:
        workers.kill()
    recorded = [read_dump("collectives_", str(run / "stacks" / f"collectives_{rank}")) for rank in (0, 1)]
    assert [r["rank"] for r in recorded] == [0, 1], said
    last = [r["entries"][-1] for r in recorded]
    print(codes, [(e["profiling_name"], e["state"]) for e in last])
    assert last[0]["profiling_name"].startswith("nccl:") and last[0]["state"] != "completed"
    if writer == "watchdog":
        assert codes[0] not in (None, 0), said
