"""The demo's steps are the commands a user would type: they are shown, then run as processes of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax

from megaponder.errors import UserError

POLL_SECONDS = 0.05


def run_command(console: Console, words: list[str]) -> None:
    """Shows and runs `megaponder WORDS`; its output goes where this program's goes.  UserError if it fails."""
    with _start(console, words) as process:
        code = process.wait()
    _refuse_failure(words, code)


def kill_command(console: Console, words: list[str], when: Callable[[], bool]) -> bool:
    """Starts `megaponder WORDS` and kills it with SIGKILL as soon as `when()` holds.

    Returns whether it was killed; False means that it had finished before.  UserError if it failed by itself.
    """
    with _start(console, words) as process:
        while process.poll() is None:
            if when():
                process.kill()
                return process.wait() < 0
            time.sleep(POLL_SECONDS)
    _refuse_failure(words, process.returncode)
    return False


def run_python(console: Console, code: str, *arguments: str) -> None:
    """Shows and runs a few lines of Python; `arguments` are its sys.argv[1:]."""
    console.print(Syntax(code.strip(), "python", background_color="default"))
    sys.stdout.flush()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    status = subprocess.run([sys.executable, "-c", code, *arguments], env=environment).returncode
    if status != 0:
        raise UserError(f"the Python lines above ended with exit code {status}; what they printed says why.")


def _start(console: Console, words: list[str]) -> subprocess.Popen[bytes]:
    console.print(f"[bold green]$[/] {_shown(words)}", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    return subprocess.Popen([sys.executable, "-m", "megaponder", *words])


def _refuse_failure(words: list[str], code: int) -> None:
    if code != 0:
        raise UserError(f"`{_shown(words)}` ended with exit code {code}; its last lines above say why.")


def _shown(words: list[str]) -> str:
    return shlex.join(["megaponder", *words])


def relative(path: Path) -> str:
    """A path as one would type it: relative to the current folder where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
