"""The server of `forks.py`: it imports what is heavy, and forks a process for every connection."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import pickle
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests import forks


def main() -> None:
    """Serve the listening socket whose descriptor is the first argument, until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that started it
    listening = socket.socket(fileno=int(sys.argv[1]))
    import tests.forkserver_preload  # noqa: F401

    os.fsync = lambda handle: None  # no machine goes down here, and a save would wait for the disk a hundred times
    gc.collect()
    gc.set_threshold(*forks.COLLECTED)
    gc.freeze()  # processes share these pages, and their collections need not look at them
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    chosen = selectors.DefaultSelector()
    for source in (0, listening, ended):
        chosen.register(source, selectors.EVENT_READ)
    running: dict[socket.socket, int] = {}
    while True:
        for key, _ in chosen.select():
            if key.fileobj == 0:
                for pid in running.values():
                    _kill(pid)
                os._exit(0)
            if key.fileobj is listening:
                connection = _begin(listening, [listening, ended, wake, *running])
                if connection is not None:
                    running[connection[0]] = connection[1]
                    chosen.register(connection[0], selectors.EVENT_READ)
            elif key.fileobj is ended:
                ended.recv(4096)
                _tell(running, chosen)
            elif key.fileobj in running:  # its other end was closed
                _kill(running[key.fileobj])  # type: ignore[index]
                chosen.unregister(key.fileobj)


def _begin(listening: socket.socket, others: list[socket.socket]) -> tuple[socket.socket, int] | None:
    """Fork what the next connection asks for; the connection and the process id."""
    connection, _ = listening.accept()
    text, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not text.endswith(b"\n"):
        more = connection.recv(1 << 20)
        if not more:
            return None
        text += more
    pid = os.fork()
    if pid == 0:
        for each in (connection, *others):
            each.close()
        _become(json.loads(text), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(b"%d\n" % pid)
    return connection, pid


def _tell(running: dict[socket.socket, int], chosen: selectors.BaseSelector) -> None:
    """Send the exit codes of all that have ended."""
    for connection, pid in list(running.items()):
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            continue
        del running[connection]
        with contextlib.suppress(KeyError, OSError):  # nobody may wait for it
            chosen.unregister(connection)
            connection.sendall(b"%d" % os.waitstatus_to_exitcode(status))
        connection.close()


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # it may not have got to its own session yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """In the forked child: own session, own streams, then what was asked for; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[assignment]
        os.environ.clear()
        os.environ.update(request["env"])
        if "call" in request:
            _call(**request["call"])
        else:
            os.chdir(request["folder"])
            _run(request["arguments"])
        threading._shutdown()  # type: ignore[attr-defined]
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: list[str]) -> None:
    """What `python ARGUMENTS` runs; a module or a file starts others in the same way."""
    while arguments[0] == "-u":
        del arguments[0]
    kind, *rest = arguments
    _heed_path()
    if kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__", "__builtins__": __builtins__})
        return
    sys.executable = forks.python()
    if kind == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


def _heed_path() -> None:
    """Look for modules where PYTHONPATH of the request says."""
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = ["", *path, *(p for p in sys.path[1:] if p not in path)]


def _call(folder: str, rank: int) -> None:
    """The function that `call.pkl` of the folder names; its value goes into a file beside it."""
    _heed_path()
    faulthandler.register(signal.SIGUSR1, file=2)
    target, args = pickle.loads(Path(folder, "call.pkl").read_bytes())
    module, function = target.split(":")
    result = getattr(importlib.import_module(module), function)(**args)
    Path(folder, f"result{rank}.pkl").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
