"""Processes forked from one that has imported PyTorch, megatron-core and transformers: they start in milliseconds.

One server for all processes of a test session, over a Unix socket; another tree or interpreter, which would import
other packages, has one of its own.  A connection is a process: the request names what it runs, the answers are its id
and, later, its exit code; the process is killed where the connection closes before that.  `python()` is a program that
stands for `sys.executable`, with `-m`, `-c` or a file, wherever the start itself is not what is tested:

    subprocess.run([forks.python(), "-m", "megaponder", "train", "run.yaml"])
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ADDRESS = f"MEGAPONDER_FORKS_{zlib.crc32(os.fsencode(f'{HERE} {sys.prefix}')):08X}"
"""The environment variable with the path of the socket of this tree's and interpreter's server."""
COLLECTED = 100_000, 50, 100
"""Thresholds of garbage collection: with Python's own, which suit small programs, it is a twentieth of the time."""
_kept: list[Any] = []  # the server and its folder, for as long as this process lives


def python() -> str:
    """The path of a program that runs what Python would run, in a forked process."""
    serve()
    return str(Path(os.environ[ADDRESS]).with_name("python"))


def serve() -> None:
    """Start the server for this process and all that it starts, unless there is one; it ends with this process."""
    import tempfile

    if ADDRESS in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    os.environ[ADDRESS] = f"{folder.name}/socket"
    program = Path(python())
    address = f'export {ADDRESS}="{os.environ[ADDRESS]}"'  # whatever the caller's environment has
    program.write_text(f'#!/bin/sh\n{address}\nexec "{sys.executable}" -S -E "{HERE}" "${ADDRESS}" "$@"\n')
    program.chmod(0o700)
    root = HERE.parents[1]
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH", "")) if p)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    env["HF_MODULES_CACHE"] = f"{folder.name}/modules"  # of transformers, which reads it once
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.environ[ADDRESS])
        listening.listen(64)
        command = [sys.executable, "-m", "tests.forkserver", str(listening.fileno())]
        server = subprocess.Popen(command, cwd=root, env=env, stdin=subprocess.PIPE, pass_fds=[listening.fileno()])
    _kept.extend((folder, server))


class Process:
    """A forked process, whose standard input, output and error are the three descriptors."""

    def __init__(self, request: dict[str, Any], descriptors: list[int], address: str = ""):
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address or os.environ[ADDRESS])
        line = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self._connection, [line], descriptors)
        self._connection.sendall(line[sent:])
        answer = b""
        while not answer.endswith(b"\n"):  # not a byte more: the exit code comes later
            digit = self._connection.recv(1)
            if not digit:
                raise RuntimeError("the server that tests fork processes from has ended")
            answer += digit
        self.pid = int(answer)
        self.code: int | None = None

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code (negative: the signal that ended it), None if it still runs after so many seconds."""
        if self.code is None:
            self._connection.settimeout(seconds)
            with contextlib.suppress(BlockingIOError, TimeoutError):
                answer = self._connection.recv(64)
                self.code = int(answer or -signal.SIGKILL)  # the server has ended: so have its processes
                self._connection.close()
        return self.code


def main() -> None:
    """Run what `python` would run with the arguments behind the address, in a forked process, and end as it ends."""
    _, address, *arguments = sys.argv
    passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until there is somebody to pass them on to
    process = Process({"arguments": arguments, "folder": os.getcwd(), "env": dict(os.environ)}, [0, 1, 2], address)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(process.pid, number)

    for number in passed_on:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    code = process.wait()
    assert code is not None
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
