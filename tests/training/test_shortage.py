"""Descriptors, threads and memory that run out, in processes of their own: a sentence, and the code that fits."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megaponder.config.load import dump
from megaponder.errors import UserError, known
from megaponder.monitor.jsonl import read
from megaponder.training.shortage import RanOutError, worth_another_start
from tests.distributed import ROOT, Workers, free_port
from tests.training.conftest import Base
from tests.training.workers import config

HERE = "tests.training.test_shortage"


def train(run: str, data: str, descriptors: int, at_step: int = 0, held: int = 0, **changes: Any) -> int:
    """In a worker: `megaponder train` whose process may have so many descriptors, from the given step on; in step
    `held` it waits for the file RUN.go."""
    from megaponder.cli.main import main
    from megaponder.engine.step import Engine

    def limit() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard if at_step else descriptors))

    original = Engine.forward_backward

    def forward_backward(self: Any, batches: Any, step: int, train: bool) -> Any:
        if train and step == at_step:
            limit()
            if step == 1:  # before anything has been done
                open(os.devnull).close()
        while train and step == held and not os.path.exists(f"{run}.go"):
            time.sleep(0.01)
        return original(self, batches, step, train)

    Engine.forward_backward = forward_backward  # type: ignore[method-assign]
    if not at_step:
        limit()
    path = Path(run).with_suffix(".yaml")
    dump(config(run, data, **changes), path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = main(["train", str(path)])
    if at_step:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)  # the result is a file
    return code


@pytest.mark.parametrize(("step", "code"), [(2, 69), (1, 2)])
def test_descriptors_that_run_out(base: Base, step: int, code: int) -> None:
    """After a step another start may help; before, it would end in the same way."""
    run = base.root / f"out-{step}"
    job = {"run": str(run), "data": base.data, "descriptors": 3, "at_step": step, "train__eval_every": 0}
    workers = Workers(f"{HERE}:train", 1, job)
    try:
        assert workers.wait(600) == [code], workers.output()
        said = workers.output(0)
        assert "Too many open files" in said or "raise the limit (ulimit -n)" in said
        assert "Traceback" not in said and said.count("error: ") == 1, said
    finally:
        workers.kill()


def test_idle_connections_do_not_end_a_run(base: Base) -> None:
    port, run = free_port(), base.root / "idle"
    changes = {"logging__prometheus_port": port, "train__steps": 60, "checkpoint__every": 20, "train__eval_every": 0}
    job = {"run": str(run), "data": base.data, "descriptors": 256, "held": 30}
    workers = Workers(f"{HERE}:train", 1, job | changes)
    try:
        with ExitStack() as stack:
            deadline = time.monotonic() + 300
            while not read(run / "metrics.jsonl"):  # then the port is open
                assert time.monotonic() < deadline and workers.poll() == [None], workers.output()
                time.sleep(0.05)
            for _ in range(300):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                client.sendall(b"GET /met")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                assert b"megaponder_step" in answer.read()
            assert workers.poll() == [None], workers.output()
            Path(f"{run}.go").touch()
            assert workers.wait(600) == [0], workers.output()
        assert "step_00000060" in os.listdir(run / "checkpoints")
    finally:
        workers.kill()


@pytest.mark.parametrize(("limit", "words"), [("n 64", "ulimit -n = 64: "), ("v 300000", "ulimit -v = 300000: ")])
def test_limits_that_are_too_low_are_told_before_the_work(tmp_path: Path, limit: str, words: str) -> None:
    (tmp_path / "run.yaml").write_text("run: r\n")
    script = f"ulimit -{limit}; exec {sys.executable} -m megaponder train run.yaml"
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {words}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_what_a_machine_lacks_is_a_sentence() -> None:
    files = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/some/file")
    for error, words in (
        (files, "ulimit -n"), (OSError(errno.ENFILE, "x"), "fs.file-max"), (BlockingIOError(errno.EAGAIN, "x"), "-u"),
        (RuntimeError("can't start new thread"), "No more processes or threads"),
        (MemoryError(), "Memory ran out (of the host)"), (MemoryError("Unable to allocate 9 GiB"), "allocate 9 GiB"),
        (ImportError("help:\nx.so: failed to map segment from shared object"), "(x.so: failed to map segment"),
        (ImportError("x.so: cannot open shared object file: Too many open files"), "ulimit -n"),
    ):  # fmt: skip
        assert words in str(known(error)), error
    for bug in (RuntimeError("shapes differ"), ImportError("No module named x"), SystemError("error return without")):
        assert known(bug) is None
    for raised in (files, UserError("The checkpoint could not be written to x (Too many open files).")):
        with pytest.raises(RanOutError) as caught, worth_another_start() as start:
            start.has_worked = lambda: True
            raise raised
        assert caught.value.exit_code == 69
        with pytest.raises(type(raised)), worth_another_start():
            raise raised
    with pytest.raises(UserError, match="full") as other, worth_another_start() as start:
        start.has_worked = lambda: True
        raise UserError("The disk is full.")
    assert other.value.exit_code == 2
