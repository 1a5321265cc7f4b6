"""Restarts within the processes, by NVIDIA's resiliency extension: the run goes on as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from megaponder.errors import UserError
from megaponder.monitor.jsonl import read
from megaponder.training import flight_recorder, in_process
from tests.distributed import Workers
from tests.training.conftest import Base
from tests.training.test_resume import assert_overlays

HERE = "tests.training.fault_workers"
# over gloo a rank that waits for another one hears of its error when the time of the collective is over
LIMITS: dict[str, Any] = {"parallel__timeout_minutes": 0.2, "faults__hang_minutes": 0.15}


def test_without_the_extension_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvidia_resiliency_ext", None)
    with pytest.raises(UserError, match=r"pip install 'megaponder\[resilience\]', or use 0"):
        in_process.library()


def test_collectives_are_written_when_the_groups_are_gone(tmp_path: Path) -> None:
    path = flight_recorder.write(tmp_path, 3)
    assert path is None or (path.name == "collectives_3" and path.is_file())


def restarted(base: Base, fault: str) -> Workers:
    """Two processes in which a fault happens in step 5, behind the checkpoint of step 3."""
    pytest.importorskip("nvidia_resiliency_ext.inprocess")
    job = {"run": str(base.root / f"in-process-{fault}"), "data": base.data, "faults__in_process_restarts": 1}
    return Workers(f"{HERE}:restarted", 2, {"fault": fault, "at_step": 5} | job | LIMITS)


def test_an_error_on_a_rank_costs_no_process(base: Base) -> None:
    workers = restarted(base, "error")
    try:
        assert workers.wait(300) == [0, 0], workers.output()
    finally:
        workers.kill()
    said = workers.output(0)
    assert said.count("Restart 1 of 1 within the processes.") == 1
    assert "Resuming from checkpoint" in said and "step_00000003" in said
    assert_overlays(base, "in-process-error")
    events = [r["event"] for r in read(base.root / "in-process-error" / "faults.jsonl")]
    assert events.count("restart") == 1 and {*events} <= {"restart", "hang"}, "who waits for long may tell so"


def test_a_mistake_ends_the_run_at_once(base: Base) -> None:
    workers = restarted(base, "mistake")
    try:
        assert workers.wait(300) == [2, 2]
    finally:
        workers.kill()
    assert "error: It is full." in workers.output(0) and "Restart" not in workers.output()


def test_a_process_that_is_gone_is_the_launchers(base: Base) -> None:
    workers = restarted(base, "killed")
    try:
        codes = workers.join(300)
    finally:
        workers.kill()
    assert codes == [0, -signal.SIGKILL]
    assert "cannot go on without it" in workers.output(0) or "lost another rank" in workers.output(0)
