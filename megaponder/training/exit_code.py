"""The exit code of a job of many processes.

torchrun turns every exit code of a rank into 1.  If the launcher names a file in MEGAPONDER_EXIT_FILE, every rank
appends its own code to it, if it is not 0, and the lowest is the job's: a user's mistake (2) beats a lost rank (69),
which beats a request to restart (75).  A job that started and ended without a code has lost a rank, too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from megaponder.errors import UserError


def stopped(code: int) -> int:
    """Record the code of a run that ended normally; returns the exit code of the process.

    If a launcher reads the file, that is 0: torchrun would otherwise print a traceback and kill the other ranks.
    """
    note(code)
    return 0 if os.environ.get("MEGAPONDER_EXIT_FILE") else code


def note(code: int) -> None:
    """Append this rank's exit code."""
    path = os.environ.get("MEGAPONDER_EXIT_FILE")
    if path and code:
        with contextlib.suppress(OSError), Path(path).open("a") as file:
            file.write(f"{code}\n")


def forget_earlier_attempts(rank: int) -> None:
    """After an elastic launcher's restart, codes of the previous attempt are obsolete; rank 0 removes them."""
    path = os.environ.get("MEGAPONDER_EXIT_FILE")
    if path and rank == 0 and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        Path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Records that the job has started, and the exit code of whatever ends the block early."""
    if path := os.environ.get("MEGAPONDER_BEGUN_FILE"):
        with contextlib.suppress(OSError):
            Path(path).touch()
    try:
        yield
    except UserError as error:
        note(error.exit_code)
        raise
    except KeyboardInterrupt:
        note(130)
        raise
    except BaseException:
        note(1)
        raise


def leave(code: int) -> NoReturn:
    """End this process immediately: communicators and threads of a broken job may never end by themselves."""
    note(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
