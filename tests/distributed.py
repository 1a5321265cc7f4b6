"""Run a function in N processes that see torchrun's environment variables; the multi-process tests' only launcher.

    results = run_workers("tests.layouts.workers:losses", 2, args={"pipeline": 2})

Nothing is initialised for the target: it calls `groups.init` or `init_process_group` itself.  Workers are forked from
one process that has imported PyTorch and megatron-core (`forks.py`), which saves each of them seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import random
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tests import forks

ROOT = Path(__file__).resolve().parents[1]
TAIL = 6000
"""Characters of each worker's output that a failure prints."""


_TAKEN: list[IO[bytes]] = []  # locks of this process's ports, held until it ends


def _not_handed_out() -> list[int]:
    """Ports that the system gives to nobody who does not ask for them."""
    low, high = 32768, 60999
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [port for port in range(10000, 65536) if not low <= port <= high]
    return ports if len(ports) > 4000 else list(range(12000, 32000))


def free_port() -> int:
    """A TCP port that nobody has, and that no other test process of this machine is given while this one lives."""
    folder = Path(tempfile.gettempdir()) / f"megaponder-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in random.SystemRandom().sample(_not_handed_out(), 2000):
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
        forks.serve()
        shared = os.environ | {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self._processes = [
            self._fork(rank, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world_size)
        ]
        self.pids = [process.pid for process in self._processes]

    def _fork(self, rank: int, env: dict[str, str]) -> forks.Process:
        request = {"call": {"folder": str(self.folder), "rank": rank}, "env": env}
        with (self.folder / f"out{rank}.txt").open("wb") as out, open(os.devnull) as nothing:
            return forks.Process(request, [nothing.fileno(), out.fileno(), out.fileno()])

    def output(self, rank: int | None = None) -> str:
        """What one worker printed, or the last part of what each of them did."""
        if rank is not None:
            return (self.folder / f"out{rank}.txt").read_text(errors="replace")
        return "\n".join(f"--- rank {r} of {self.target}\n{self.output(r)[-TAIL:]}" for r in range(self.world_size))

    def poll(self) -> list[int | None]:
        """Exit code of each worker (negative: the signal that ended it), None while it runs."""
        return [process.wait(0) for process in self._processes]

    def signal(self, number: int) -> None:
        """Send a signal to every worker itself (not to its children)."""
        for pid, code in zip(self.pids, self.poll(), strict=True):
            if code is None:
                os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL for every worker and all its children, at once."""
        for pid, code in zip(self.pids, self.poll(), strict=True):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if code is None:  # it may not have got to its own session yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def join(self, timeout: float = 900) -> list[int]:
        """Exit codes once all have ended.  After the first failure the others get 3 minutes; then all are killed."""
        deadline = time.monotonic() + timeout
        while True:
            codes = self.poll()
            if None not in codes:
                return [int(c or 0) for c in codes]
            if any(codes):
                deadline = min(deadline, time.monotonic() + 180)
            if time.monotonic() > deadline:
                self._ask_where()
                self.kill()
                raise AssertionError(f"{self.target}: exit codes {codes} at the time limit\n{self.output()}")
            self._processes[codes.index(None)].wait(0.2)

    def _ask_where(self) -> None:
        """Let each that still runs print where it is, and wait a little until it has begun to."""
        before, end = [len(self.output(r)) for r in range(self.world_size)], time.monotonic() + 20
        asked = [r for r, code in enumerate(self.poll()) if code is None]
        self.signal(signal.SIGUSR1)
        while any(len(self.output(r)) == before[r] for r in asked) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)

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
