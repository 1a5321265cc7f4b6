"""One job per run folder: live owners are refused by name, dead ones are taken over from."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys

import psutil
import pytest

from megaponder import processes
from megaponder.errors import UserError
from megaponder.training.lock import RunLock


def owner(path) -> dict:
    return json.loads((path / "lock.json").read_text())


def test_a_live_owner_is_refused_by_name(tmp_path):
    first = RunLock(tmp_path)
    first.acquire()
    assert owner(tmp_path)["pid"] == os.getpid()
    with pytest.raises(UserError, match=rf"process {os.getpid()} on {socket.gethostname()}"):
        RunLock(tmp_path).acquire()
    first.release()
    assert not (tmp_path / "lock.json").exists()
    second = RunLock(tmp_path)
    second.acquire()
    second.release()


def test_a_killed_owner_on_this_host_is_replaced_at_once(tmp_path, monkeypatch):
    code = "import sys; from pathlib import Path; from megaponder.training.lock import RunLock\n"
    code += "RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {process.pid}"):
            RunLock(tmp_path).acquire()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # as where nobody waits for what has ended
        monkeypatch.setattr(RunLock, "_moves", lambda self: pytest.fail("only owners elsewhere are watched"))
        lock = RunLock(tmp_path)
        lock.acquire()
        lock.release()


def foreign(path, **changes) -> None:
    fields = {"pid": 1, "host": "elsewhere", "started": 0.0, "job": None, "since": "then"} | changes
    (path / "lock.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "content", ["[]", "null", "5", "{", "[" * 100_000, *({"pid": x} for x in ("7", -5, 2**70)), {"started": "x"}, None]
)
def test_what_is_no_lock_is_replaced(tmp_path, content):
    if content is None:
        os.mkfifo(tmp_path / "lock.json")
    elif isinstance(content, dict):
        foreign(tmp_path, host=socket.gethostname(), **content)
    else:
        (tmp_path / "lock.json").write_text(content)
    lock = RunLock(tmp_path)
    lock.acquire()
    assert owner(tmp_path)["pid"] == os.getpid()
    lock.release()


@pytest.mark.parametrize("own", [{}, {"started": psutil.Process().create_time(), "birth": "another boot 77"}])
def test_a_reused_process_id_is_not_the_owner(tmp_path, own):
    foreign(tmp_path, pid=os.getpid(), host=socket.gethostname(), **own)
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()


@pytest.mark.skipif(processes.birth(os.getpid()) is None, reason="the system does not tell when a process began")
def test_an_owner_stays_the_owner_when_the_clock_is_set(tmp_path):
    first = RunLock(tmp_path)
    first.acquire()
    (tmp_path / "lock.json").write_text(json.dumps(owner(tmp_path) | {"started": 0.0}))
    with pytest.raises(UserError, match=rf"process {os.getpid()}"):
        RunLock(tmp_path).acquire()
    first.release()


def test_a_silent_owner_elsewhere_is_replaced_and_a_beating_one_refused(tmp_path):
    foreign(tmp_path)
    lock = RunLock(tmp_path, patience=0.3)
    lock.acquire()
    lock.release()

    foreign(tmp_path)
    beat = RunLock(tmp_path, beat=0.05)
    beater = multiprocessing.get_context("fork").Process(target=beat._beat)
    beater.start()
    try:
        with pytest.raises(UserError, match="on elsewhere since then"):
            RunLock(tmp_path, patience=600).acquire()
    finally:
        beater.kill()
        beater.join()


def test_a_requeued_job_takes_its_own_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    foreign(tmp_path, job="77")
    lock = RunLock(tmp_path, patience=1000)
    lock.acquire()
    lock.release()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run = '.*file/run': the folder cannot be created \(Not a directory\)"):
        RunLock(tmp_path / "file" / "run").acquire()


def test_a_half_written_lock_is_replaced(tmp_path):
    (tmp_path / "lock.json").write_text('{"pid": 1')
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_lost_lock_is_not_taken_from_its_new_owner(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    foreign(tmp_path)
    lock.release()
    assert owner(tmp_path)["host"] == "elsewhere"
