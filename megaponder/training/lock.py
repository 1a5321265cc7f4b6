"""One job per run folder: a lock file that names its owner, and the rules for taking over a dead owner's lock."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from megaponder import files, processes
from megaponder.errors import UserError

BEAT = 10.0
"""Seconds between heartbeats of an owner."""
PATIENCE = 35.0
"""Seconds without a heartbeat after which an owner on another host counts as dead."""


@contextmanager
def own_run(run: Path) -> Iterator[None]:
    """Hold a run folder for all ranks; UserError on all of them if a live job holds it, or nodes do not share it."""
    from megaponder.ranks import on_first_rank  # imported here: the lock itself does not need torch
    from megaponder.training.shared_folder import prove_shared

    lock = RunLock(run)
    try:
        on_first_rank(lock.acquire)
        prove_shared(run)
        yield
    finally:
        lock.release()


class RunLock:
    """Holds `<run>/lock.json` between `acquire` and `release`.

    An owner on this host is alive if its process is.  An owner elsewhere is watched: it touches the file every `BEAT`
    seconds.  A requeued Slurm job takes its own earlier lock at once, because a job id never runs twice at the same
    time.
    """

    def __init__(self, run: Path, beat: float = BEAT, patience: float = PATIENCE):
        self.path, self.beat, self.patience = run / "lock.json", beat, patience
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock; UserError if a live job holds it."""
        files.refuse_lost_link(self.path.parent)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"run = {str(self.path.parent)!r}: the folder cannot be created ({error.strerror}); choose another one."
            ) from error
        with FileLock(str(self.path) + ".guard"):  # two jobs must not take over from the same dead owner
            while not self._create():
                if (taken := self.holder()) is not None:
                    raise UserError(taken)
                self.path.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    def holder(self) -> str | None:
        """The sentence that names the live job using the folder, if there is one."""
        owner = self._owner()
        if owner is None or not self._alive(owner):
            return None
        return (
            f"run = {str(self.path.parent)!r}: another job uses this folder (process {owner['pid']} on "
            f"{owner['host']} since {owner['since']}); stop it or use another run folder."
        )

    def release(self) -> None:
        """Release the lock, if it was taken and is still ours."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self.forget()

    def forget(self) -> None:
        """Remove the lock if it is this process's: also one that an interrupted attempt has left behind."""
        with contextlib.suppress(OSError):  # it may not hide why the run ends; the next start sees a dead owner
            owner = self._owner()
            if owner is not None and owner["pid"] == os.getpid() and owner["host"] == socket.gethostname():
                self.path.unlink(missing_ok=True)

    def _create(self) -> bool:
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": psutil.Process().create_time(),
            "birth": processes.birth(os.getpid()),
            "job": os.environ.get("SLURM_JOB_ID"),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with files.naming(self.path), os.fdopen(handle, "w") as file:
            json.dump(me, file)
        return True

    def _owner(self) -> dict[str, Any] | None:
        """Who holds the lock; None if the file is gone or was never finished."""
        try:
            if files.is_special(self.path):
                return None
            owner = json.loads(self.path.read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
            return None
        kinds: dict[str, Any] = {"pid": int, "host": str, "since": str, "started": (int, float)}
        whole = isinstance(owner, dict) and all(isinstance(owner.get(name), kind) for name, kind in kinds.items())
        return owner if whole and 0 < owner["pid"] < 2**31 else None

    def _alive(self, owner: dict[str, Any]) -> bool:
        job = os.environ.get("SLURM_JOB_ID")
        if owner["host"] == socket.gethostname():
            if not processes.runs(owner["pid"]):
                return False
            born = processes.birth(owner["pid"])  # the process id may have been reused by another program
            if born is not None and isinstance(owner.get("birth"), str):
                return born == owner["birth"]
            try:
                return abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) < 2
            except psutil.NoSuchProcess:
                return False
        if job is not None and owner.get("job") == job:
            return False
        return self._moves()

    def _moves(self) -> bool:
        """Whether the file's time changes within our patience (its own clock: hosts may disagree about now)."""
        try:
            before = self.path.stat().st_mtime_ns
            deadline = time.monotonic() + self.patience
            while time.monotonic() < deadline:
                time.sleep(min(1.0, self.patience / 10))
                if self.path.stat().st_mtime_ns != before:
                    return True
        except FileNotFoundError:
            pass
        return False

    def _beat(self) -> None:
        while not self._stop.wait(self.beat):
            try:
                os.utime(self.path)
            except OSError:  # the folder or disk is gone: the training loop will report it
                return
