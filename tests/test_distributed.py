"""The launcher itself: results in rank order, failures with the output, time limits that kill."""

import os
import signal
import time

import pytest

from tests.distributed import Workers, run_workers

HERE = "tests.test_distributed"


def describe(word: str) -> tuple[int, int, int, str]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"]), word


def fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("worker one gives up")


def sleep() -> None:
    print("asleep")
    time.sleep(100)


def test_results_come_in_rank_order():
    results = run_workers(f"{HERE}:describe", 2, args={"word": "hello"}, timeout=60)
    assert [r[:2] for r in results] == [(0, 2), (1, 2)]
    assert len({r[2] for r in results}) == 1 and {r[3] for r in results} == {"hello"}


def test_a_failure_shows_the_workers_output():
    with pytest.raises(AssertionError, match="worker one gives up"):
        run_workers(f"{HERE}:fail_on_one", 2, timeout=60)


def test_the_time_limit_kills_and_shows_the_output():
    workers = Workers(f"{HERE}:sleep", 2)
    with pytest.raises(AssertionError, match=r"asleep\n(.*\n)*.*in sleep"):
        workers.wait(timeout=3)
    assert workers.poll() == [-9, -9]


def test_signals_reach_the_workers():
    workers = Workers(f"{HERE}:sleep", 2)
    workers.signal(signal.SIGTERM)
    assert workers.join(timeout=10) == [-signal.SIGTERM] * 2
