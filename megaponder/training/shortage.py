"""Descriptors, processes and threads that run out: refused at the start, and worth another start in mid-run."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megaponder.errors import LOST, UserError, shortage

NEEDED = 256
"""Descriptors that a process of a small run may need: libraries, connections to other ranks, data, checkpoints."""
WANTED = 1 << 16
LEAST_MEMORY = 1 << 30
"""Bytes of address space that the libraries of a run on the CPU alone take."""
_SIGNS = tuple(os.strerror(code) for code in (errno.EMFILE, errno.ENFILE, errno.EAGAIN))


def check_limits() -> None:
    """Raise this process's limit of descriptors as far as it may, up to `WANTED`; UserError for limits too low."""
    room = resource.getrlimit(resource.RLIMIT_AS)[0]
    if room != resource.RLIM_INFINITY and room < LEAST_MEMORY:
        raise UserError(
            f"ulimit -v = {room >> 10}: the libraries of a run need at least {LEAST_MEMORY >> 10} KiB, on a GPU many "
            "times as much; take the limit away."
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = WANTED if hard == unlimited else min(hard, WANTED)
    if soft != unlimited and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != unlimited and soft < NEEDED:
        raise UserError(
            f"ulimit -n = {soft}: a process of a run needs at least {NEEDED} files and connections; raise the limit to "
            "1024 or more."
        )


class RanOutError(UserError):
    """Steps were done, then something of the node ran out that other programs use, too: starting again may help."""

    exit_code = LOST


@dataclass
class Start:
    """A start of a run."""

    has_worked: Callable[[], bool] = lambda: False
    """Whether it has done a step."""


@contextmanager
def worth_another_start() -> Iterator[Start]:
    """What runs out once a start has done a step ends it with a code that Slurm requeues.

    A start that has done none would end the same way the next time.
    """
    start = Start()
    try:
        yield start
    except Exception as error:
        words = shortage(error)
        if words is None and isinstance(error, UserError) and any(sign in str(error) for sign in _SIGNS):
            words = str(error)  # a checkpoint that could not be written says it in its own sentence
        if words is None or not start.has_worked():
            raise
        raise RanOutError(words) from error
