"""The demo's steps are the commands a user would type: they are shown, then run as processes of their own.

The processes are forked from one that has the imports behind it (`preload`), which spares each of them the wait.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

from megaponder.errors import UserError

POLL_SECONDS = 0.25

_processes = multiprocessing.get_context("forkserver")


def warm_up() -> None:
    """Begin the imports that the commands share; they go on while the caller works."""
    from multiprocessing.forkserver import ensure_running

    # matrices of this size gain nothing from a second thread, and much is lost where it has to be waited for
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _processes.set_forkserver_preload(["megaponder.demo.preload"])
    ensure_running()


def run_command(console: Console, words: list[str]) -> None:
    """Shows and runs `megaponder WORDS`; its output goes where this program's goes.  UserError if it fails."""
    process = _start(console, words)
    process.join()
    _refuse_failure(words, process.exitcode)


def run_light(console: Console, words: list[str]) -> None:
    """The same for a command that needs none of those imports: it does not wait for them."""
    console.print(f"[bold green]$[/] {_shown(words)}", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    _refuse_failure(words, subprocess.run([sys.executable, "-m", "megaponder", *words], check=False).returncode)


def kill_command(console: Console, words: list[str], when: Callable[[], bool]) -> bool:
    """Starts `megaponder WORDS` and kills it with SIGKILL as soon as `when()` holds.

    Returns whether it was killed; False means that it had finished before.  UserError if it failed by itself.
    """
    process = _start(console, words)
    while process.exitcode is None:
        if when():
            process.kill()
            process.join()
            return (process.exitcode or 0) < 0
        time.sleep(POLL_SECONDS)
    _refuse_failure(words, process.exitcode)
    return False


class Background:
    """`megaponder WORDS > LOG &`: a command that runs while others do."""

    def __init__(self, words: list[str], log: Path):
        self.shown = f"{_shown(words)} > {relative(log)} &"
        self._words, self._log = words, log
        self._process = _forked(_megaponder, words, str(log))

    def wait(self) -> str:
        """What it has printed, once it has ended.  UserError if it failed."""
        self._process.join()
        printed = self._log.read_text(errors="replace")
        _refuse_failure(self._words, self._process.exitcode, printed)
        return printed

    def stop(self) -> None:
        """Ends it, if it still runs."""
        if self._process.exitcode is None:
            self._process.kill()


def run_python(console: Console, code: str, *arguments: str) -> None:
    """Shows and runs a few lines of Python; `arguments` are its sys.argv[1:]."""
    console.print(Syntax(code.strip(), "python", background_color="default"))
    process = _forked(_python, code, arguments)
    process.join()
    if process.exitcode != 0:
        raise UserError(f"the Python lines above ended with exit code {process.exitcode}; what they printed says why.")


@contextmanager
def forked(function: Callable[..., Any], *arguments: Any) -> Iterator[Callable[[], Any]]:
    """Runs `function(*arguments)` beside the block, where the imports are done; gives what waits for its result."""
    with _processes.Pool(1) as pool:
        yield pool.apply_async(function, arguments).get


def _start(console: Console, words: list[str]) -> BaseProcess:
    console.print(f"[bold green]$[/] {_shown(words)}", highlight=False, soft_wrap=True)
    return _forked(_megaponder, words)


def _forked(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    sys.stdout.flush()
    process = _processes.Process(target=target, args=arguments)
    process.start()
    return process


def _megaponder(words: list[str], log: str | None = None) -> None:
    from megaponder.cli.main import main

    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)

    sys.exit(main(words))


def _python(code: str, arguments: tuple[str, ...]) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<sample>", "exec"), {"__name__": "__main__"})


def _refuse_failure(words: list[str], code: int | None, printed: str = "") -> None:
    if code != 0:
        why = f"it said: {printed.strip().splitlines()[-1]}" if printed.strip() else "its last lines above say why."
        raise UserError(f"`{_shown(words)}` ended with exit code {code}; {why}")


def _shown(words: list[str]) -> str:
    return shlex.join(["megaponder", *words])


def relative(path: Path) -> str:
    """A path as one would type it: relative to the current folder where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
