"""Run a function in N processes that see torchrun's environment variables; the multi-process tests' only launcher.

    results = run_workers("tests.net.workers:losses", 2, args={"pipeline": 2})

Nothing is initialised for the target: it calls `groups.init` or `init_process_group` itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TAIL = 6000
"""Characters of each worker's output that a failure prints."""


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Workers:
    """N running processes of one target; use `wait` for their results or `kill` for a sudden death."""

    def __init__(self, target: str, world_size: int, args: Mapping[str, Any] | None = None):
        self.target, self.world_size = target, world_size
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        self.folder = Path(self._folder.name)
        (self.folder / "call.pkl").write_bytes(pickle.dumps((target, dict(args or {}))))
        port = str(free_port())
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(world_size):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "PYTHONUNBUFFERED": "1",
            }
            with open(self.folder / f"out{rank}.txt", "wb") as out:
                command = [sys.executable, "-m", "tests.distributed", str(self.folder), str(rank)]
                self.processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
                )

    def output(self, rank: int | None = None) -> str:
        """What one worker printed, or the last part of what each of them did."""
        if rank is not None:
            return (self.folder / f"out{rank}.txt").read_text(errors="replace")
        return "\n".join(f"--- rank {r} of {self.target}\n{self.output(r)[-TAIL:]}" for r in range(self.world_size))

    def signal(self, number: int) -> None:
        """Send a signal to every worker itself (not to its children)."""
        for p in self.processes:
            if p.poll() is None:
                p.send_signal(number)

    def kill(self) -> None:
        """SIGKILL for every worker and all its children, at once."""
        for p in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
        for p in self.processes:
            p.wait()

    def join(self, timeout: float = 240) -> list[int]:
        """Exit codes once all have ended.  After the first failure the others get 10 s; then all are killed."""
        deadline = time.monotonic() + timeout
        while True:
            codes = [p.poll() for p in self.processes]
            if all(c is not None for c in codes):
                return [int(c) for c in codes if c is not None]
            if any(codes):
                deadline = min(deadline, time.monotonic() + 10)
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{self.target}: exit codes {codes} at the time limit\n{self.output()}")
            time.sleep(0.05)

    def wait(self, timeout: float = 240) -> list[Any]:
        """Return values in rank order; AssertionError with all output if a worker failed."""
        codes = self.join(timeout)
        if any(codes):
            raise AssertionError(f"{self.target}: exit codes {codes}\n{self.output()}")
        return [pickle.loads((self.folder / f"result{r}.pkl").read_bytes()) for r in range(self.world_size)]


def run_workers(
    target: str, world_size: int, *, args: Mapping[str, Any] | None = None, timeout: float = 240
) -> list[Any]:
    """Call `module:function(**args)` in `world_size` processes and return their picklable results in rank order.

    After `timeout` seconds the whole group is killed, and the AssertionError carries every worker's output.
    """
    workers = Workers(target, world_size, args)
    try:
        return workers.wait(timeout)
    finally:
        workers.kill()


def _work(folder: Path, rank: int) -> None:
    target, args = pickle.loads((folder / "call.pkl").read_bytes())
    module, function = target.split(":")
    result = getattr(importlib.import_module(module), function)(**args)
    (folder / f"result{rank}.pkl").write_bytes(pickle.dumps(result))


if __name__ == "__main__":  # spawned children (checkpoint writers) import this file again: keep the top light
    _work(Path(sys.argv[1]), int(sys.argv[2]))
