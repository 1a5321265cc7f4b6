"""Errors that are not bugs, on stderr: one line, printed once even if all processes of a node have it, and its exit
code."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaponder.errors import MACHINE, UserError, known

STALE_SECONDS = 60
"""Age after which a marker belongs to an earlier launch with a reused process id."""


def ended(work: Callable[[], Any]) -> int:
    """Do a command's work; returns its exit code or, after printing the sentence, the error's (see
    `megaponder.errors`)."""
    try:
        code = work()
        sys.stdout.flush()
        return int(code or 0)
    except UserError as error:
        report_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        report_error("interrupted")
        return 130
    except BrokenPipeError:  # `megaponder plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MACHINE as error:
        if (problem := known(error)) is None:
            raise
        report_error(str(problem))
        return problem.exit_code


def report_error(message: str) -> None:
    """Print `error: ...`; under a launcher only the first process of a node with this message prints it.

    All ranks find the same mistake before any process group exists, so they coordinate through a marker file named
    after the launcher's process id.  Nodes other than the first name themselves: the mistake may be theirs only.
    """
    if "RANK" not in os.environ:
        _say(f"error: {message}")
        return
    if _first_to_say(message):
        elsewhere = int(os.environ.get("GROUP_RANK", "0")) > 0
        host = f" on {os.uname().nodename}" if elsewhere else ""
        _say(f"error{host}: {message}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a log on the full disk itself: the exit code still tells
        print(line, file=sys.stderr, flush=True)


def _first_to_say(message: str) -> bool:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")  # the launcher's process id stays the same
    digest = hashlib.sha256(f"{os.getppid()} {attempt} {message}".encode()).hexdigest()[:16]
    try:
        marker = Path(tempfile.gettempdir()) / f"megaponder-error-{os.getuid()}-{digest}"
        with contextlib.suppress(FileNotFoundError):
            if time.time() - marker.stat().st_mtime > STALE_SECONDS:
                marker.unlink(missing_ok=True)
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:  # no place for a marker, or no descriptor: better printed twice than never
        return True
    return True
