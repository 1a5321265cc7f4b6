"""Run a function in N processes that see torchrun's environment variables; the multi-process tests' only launcher.

    results = run_workers("tests.layouts.workers:losses", 2, args={"pipeline": 2})

Nothing is initialised for the target: it calls `groups.init` or `init_process_group` itself.  Workers are forked from
one process that has imported torch and megatron-core, which saves each of them the ten seconds of that import.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
TAIL = 6000
"""Characters of each worker's output that a failure prints."""


_TAKEN: list[IO[bytes]] = []  # locks of this process's ports, held until it ends


def free_port() -> int:
    """A TCP port that nobody has, and that no other test process of this machine is given while this one lives."""
    folder = Path(tempfile.gettempdir()) / f"megaponder-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in random.SystemRandom().sample(range(12000, 32000), 2000):  # below those that the system hands out
        lock = (folder / str(port)).open("wb")
        with contextlib.suppress(OSError), socket.socket() as s:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            s.bind(("127.0.0.1", port))
            _TAKEN.append(lock)
            return port
        lock.close()
    raise RuntimeError("no port is free")


class Workers:
    """N running processes of one target; use `wait` for their results or `kill` for a sudden death."""

    def __init__(self, target: str, world_size: int, args: Mapping[str, Any] | None = None):
        self.target, self.world_size = target, world_size
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        self.folder = Path(self._folder.name)
        (self.folder / "call.pkl").write_bytes(pickle.dumps((target, dict(args or {}))))
        shared = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self._zygote = Zygote.running()
        self.pids = [
            self._zygote.fork(self.folder, rank, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(world_size)
        ]

    def output(self, rank: int | None = None) -> str:
        """What one worker printed, or the last part of what each of them did."""
        if rank is not None:
            return (self.folder / f"out{rank}.txt").read_text(errors="replace")
        return "\n".join(f"--- rank {r} of {self.target}\n{self.output(r)[-TAIL:]}" for r in range(self.world_size))

    def poll(self) -> list[int | None]:
        """Exit code of each worker (negative: the signal that ended it), None while it runs."""
        return self._zygote.poll(self.pids)

    def signal(self, number: int) -> None:
        """Send a signal to every worker itself (not to its children)."""
        for pid, code in zip(self.pids, self.poll(), strict=True):
            if code is None:
                os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL for every worker and all its children, at once."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        while None in self.poll():
            time.sleep(0.01)

    def join(self, timeout: float = 900) -> list[int]:
        """Exit codes once all have ended.  After the first failure the others get 10 s; then all are killed."""
        deadline = time.monotonic() + timeout
        while True:
            codes = self.poll()
            if None not in codes:
                return [int(c or 0) for c in codes]
            if any(codes):
                deadline = min(deadline, time.monotonic() + 10)
            if time.monotonic() > deadline:
                self.signal(signal.SIGUSR1)  # makes each of them print where it is
                time.sleep(0.5)
                self.kill()
                raise AssertionError(f"{self.target}: exit codes {codes} at the time limit\n{self.output()}")
            time.sleep(0.2)

    def wait(self, timeout: float = 900) -> list[Any]:
        """Return values in rank order; AssertionError with all output if a worker failed or left by `os._exit`."""
        codes = self.join(timeout)
        if any(codes):
            raise AssertionError(f"{self.target}: exit codes {codes}\n{self.output()}")
        results = [self.folder / f"result{r}.pkl" for r in range(self.world_size)]
        if not all(r.exists() for r in results):
            raise AssertionError(f"{self.target}: a process left before its end\n{self.output()}")
        return [pickle.loads(r.read_bytes()) for r in results]


def run_workers(
    target: str, world_size: int, *, args: Mapping[str, Any] | None = None, timeout: float = 900
) -> list[Any]:
    """Call `module:function(**args)` in `world_size` processes and return their picklable results in rank order.

    After `timeout` seconds the whole group is killed, and the AssertionError carries every worker's output.
    """
    workers = Workers(target, world_size, args)
    try:
        return workers.wait(timeout)
    finally:
        workers.kill()


class Zygote:
    """The process that workers are forked from; it ends when this one does, because its input ends."""

    _one: Zygote | None = None

    def __init__(self) -> None:
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "tests.distributed"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @classmethod
    def running(cls) -> Zygote:
        """The one of this process."""
        if cls._one is None or cls._one._process.poll() is not None:
            cls._one = cls()
        return cls._one

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def fork(self, folder: Path, rank: int, env: dict[str, str]) -> int:
        """Process id of a new worker."""
        return int(self._ask({"folder": str(folder), "rank": rank, "env": env}))

    def poll(self, pids: list[int]) -> list[int | None]:
        """Exit codes; None while running."""
        return list(self._ask({"poll": pids}))


def _serve() -> None:
    """The zygote: answer questions from standard input until it ends."""
    import tests.forkserver_preload  # noqa: F401

    gc.collect()
    gc.freeze()  # workers share these pages, and their collections need not look at them
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    codes: dict[int, int] = {}
    for line in sys.stdin:
        question = json.loads(line)
        answers.write(json.dumps(_answer(question, codes)) + "\n")
        answers.flush()


def _answer(question: Any, codes: dict[int, int]) -> Any:
    if "poll" not in question:
        pid = os.fork()
        if pid == 0:
            _become_worker(Path(question["folder"]), question["rank"], question["env"])
        return pid
    for pid in question["poll"]:
        if pid not in codes:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
    return [codes.get(pid) for pid in question["poll"]]


def _become_worker(folder: Path, rank: int, env: dict[str, str]) -> None:
    """In the forked child: own session, own output file, then the target; never returns."""
    code = 1
    try:
        os.setsid()
        out = os.open(folder / f"out{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        faulthandler.register(signal.SIGUSR1, file=out)
        os.environ.update(env)
        target, args = pickle.loads((folder / "call.pkl").read_bytes())
        module, function = target.split(":")
        result = getattr(importlib.import_module(module), function)(**args)
        (folder / f"result{rank}.pkl").write_bytes(pickle.dumps(result))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
