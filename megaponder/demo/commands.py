"""The demo's steps are the commands a user would type: each is shown, then run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax

from megaponder.errors import UserError

POLL_SECONDS = 0.25


class Command:
    """`megaponder WORDS`, shown and started; its output goes where this program's goes, or to a file."""

    def __init__(self, console: Console, words: Sequence[str], log: Path | None = None):
        self.shown, self._log = shlex.join(["megaponder", *words]), log
        to_log = f" > {relative(log)} &" if log else ""
        console.print(f"[bold green]$[/] {self.shown}{to_log}", highlight=False, soft_wrap=True)
        sys.stdout.flush()
        # matrices of this size gain nothing from a second thread, and waiting for one costs much
        env = {"OMP_NUM_THREADS": "1"} | os.environ
        out = log.open("w") if log else None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megaponder", *words], env=env, stdout=out, stderr=subprocess.STDOUT if log else None
        )

    def wait(self) -> None:
        """Wait until it ends; UserError if it failed."""
        if code := self.process.wait():
            said = self._log.read_text(errors="replace").strip().splitlines() if self._log else []
            why = f"it said: {said[-1]}" if said else "its last lines above say why."
            raise UserError(f"`{self.shown}` ended with exit code {code}; {why}")

    def kill_when(self, reached: Callable[[], bool]) -> bool:
        """Kill it with SIGKILL as soon as `reached()` holds; False if it ended before.  UserError if it failed."""
        while self.process.poll() is None:
            if reached():
                self.stop()
                return True
            time.sleep(POLL_SECONDS)
        self.wait()
        return False

    def stop(self) -> None:
        """Kill it, if it is still running."""
        self.process.kill()
        self.process.wait()


def run_python(console: Console, code: str, *arguments: str) -> None:
    """Shows and runs a few lines of Python; `arguments` are its sys.argv[1:]."""
    console.print(Syntax(code.strip(), "python", background_color="default"))
    sys.stdout.flush()
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if status := subprocess.run([sys.executable, "-c", code, *arguments], env=env).returncode:
        raise UserError(f"the Python lines above ended with exit code {status}; what they printed says why.")


def relative(path: Path) -> str:
    """A path as one would type it: relative to the current folder where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
