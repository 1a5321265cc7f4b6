"""What a start and an end take, by phase."""

from __future__ import annotations

import time

import pytest

from megaponder.monitor import start_end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(start_end, "_age", lambda: 2.0)
    for name, value in {"_start": None, "_started": False, "_end": None}.items():
        monkeypatch.setattr(start_end, name, value)
    return now


def test_a_start_begins_with_the_process_and_is_told_once(clock: list[float]) -> None:
    assert start_end.started() is None
    for phase, seconds in (("configuration", 1.0), ("imports", 4.0), ("configuration", 0.5), ("first_step", 3.0)):
        start_end.starting(phase)
        clock[0] += seconds
    told = start_end.started()
    assert told == {"imports": 6.0, "configuration": 1.5, "first_step": 3.0}
    assert start_end.sentence("to the end of the first step", told) == (
        "10.5 s to the end of the first step: imports 6.0, configuration 1.5, first step 3.0."
    )
    start_end.starting("data")
    assert start_end.started() is None


def test_each_run_has_an_end(clock: list[float]) -> None:
    start_end.ending("processes")  # of a run that was not saved
    assert start_end.ended() is None
    for _ in range(2):
        for phase in start_end.END:
            start_end.ending(phase)
            clock[0] += 0.5
        assert start_end.ended() == dict.fromkeys(start_end.END, 0.5)
    assert start_end.ended() is None


def test_the_age_of_this_process() -> None:
    began, first = time.monotonic(), start_end._age()
    time.sleep(0.05)
    assert 0.02 < start_end._age() - first < time.monotonic() - began + 0.02 and first > 0.1
