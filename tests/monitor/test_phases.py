"""The one clock of a rank: phases by hand."""

from __future__ import annotations

import pytest

from megaponder.config.schema import RunConfig
from megaponder.monitor.monitor import Monitor
from megaponder.monitor.phases import Now, PhaseClock
from megaponder.monitor.throughput import Costs


def test_entering_a_phase_ends_the_one_before() -> None:
    now = [100.0]
    clock, heard = PhaseClock(lambda: now[0]), []
    clock.listeners.append(lambda before, entered: heard.append((before.phase, entered.phase)))
    now[0] += 3
    clock.enter("data", 7)
    now[0] += 1
    clock.enter("forward_backward")
    now[0] += 4
    assert clock.now == Now(7, "forward_backward", 104.0) and clock.idle() == 4
    assert clock.lap() == {"start": 3, "data": 1, "forward_backward": 4} and clock.lap() == {"forward_backward": 0}
    assert heard[:2] == [("start", "data"), ("data", "forward_backward")]
    with pytest.raises(AssertionError):
        clock.enter("lunch")


def test_an_interruption_goes_back_to_what_it_interrupted() -> None:
    now = [0.0]
    clock = PhaseClock(lambda: now[0])
    clock.enter("report", 1)
    now[0] += 1
    with clock.phase("checkpoint"):
        now[0] += 10
    assert clock.now.phase == "report"
    now[0] += 2
    assert clock.lap() == {"start": 0, "report": 3, "checkpoint": 10}


def test_a_step_contains_no_evaluation(tmp_path) -> None:
    """Rows: mean seconds of the phases since the last row; evaluation and checkpoint apart."""
    now = [0.0]
    clock = PhaseClock(lambda: now[0])
    monitor = Monitor(RunConfig(str(tmp_path)), 10, Costs(1.0, 1.0, 1, None), False, clock)
    monitor.start(0, 0)
    for step, compute in ((1, 4.0), (2, 2.0)):
        clock.enter("data", step)
        now[0] += 1
        clock.enter("forward_backward")
        now[0] += compute
        clock.enter("report")
        parts = monitor.stepped(step)
        now[0] += 0.5
        if step == 1:
            with clock.phase("evaluation"):
                now[0] += 30
    assert parts == {"report": 0.5, "data": 1, "forward_backward": 2}
    assert monitor.seconds() == 5.0 + 3.5
    assert monitor._means() == {
        "data_seconds": 1, "agree_seconds": 0, "forward_backward_seconds": 3, "optimizer_seconds": 0,
        "report_seconds": 0.25,
    }  # fmt: skip
    assert monitor.seconds() == 0
