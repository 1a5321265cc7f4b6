"""The launcher itself: results in rank order, failures with the output, time limits that kill."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.distributed import ROOT, Workers, run_workers

HERE = "tests.test_distributed"


def describe(word: str) -> tuple[int, int, int, str]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"]), word


def fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("worker one gives up")


def sleep() -> None:
    print("asleep")
    time.sleep(600)


def test_results_come_in_rank_order():
    results = run_workers(f"{HERE}:describe", 2, args={"word": "hello"}, timeout=300)
    assert [r[:2] for r in results] == [(0, 2), (1, 2)]
    assert len({r[2] for r in results}) == 1 and {r[3] for r in results} == {"hello"}


def test_a_failure_shows_the_workers_output():
    with pytest.raises(AssertionError, match="worker one gives up"):
        run_workers(f"{HERE}:fail_on_one", 2, timeout=300)


def test_the_time_limit_kills_and_shows_the_output():
    workers = Workers(f"{HERE}:sleep", 2)
    while any("asleep" not in workers.output(rank) for rank in range(2)):
        assert workers.poll() == [None, None], workers.output()
        time.sleep(0.02)
    with pytest.raises(AssertionError, match=r"asleep\n(.*\n)*.*in sleep"):
        workers.wait(timeout=0.1)
    assert workers.poll() == [-9, -9]


def test_signals_reach_the_workers():
    workers = Workers(f"{HERE}:sleep", 2)
    workers.signal(signal.SIGTERM)
    assert workers.join(timeout=300) == [-signal.SIGTERM] * 2


def test_two_runs_on_one_machine_choose_different_ports():
    """Each holds its ports for as long as it lives, whatever another process chooses meanwhile."""
    program = "import sys; from tests.distributed import free_port\n"
    program += "print(*[free_port() for _ in range(200)], flush=True); sys.stdin.read()"
    command, folder = [sys.executable, "-c", program], ROOT
    runs = [
        subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in "ab"
    ]
    try:
        ports = [port for run in runs for port in run.stdout.readline().split()]
        assert len(ports) == len(set(ports)) == 400
    finally:
        for run in runs:
            run.communicate()
