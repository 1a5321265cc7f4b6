"""Descriptors, processes and threads that run out: an error at the start, but worth a restart later in a run."""

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
"""Bytes of address space that a CPU run's libraries alone take."""
_SIGNS = tuple(os.strerror(code) for code in (errno.EMFILE, errno.ENFILE, errno.EAGAIN))


def check_limits() -> None:
    """Raise this process's limit of descriptors as far as allowed, up to `WANTED`; UserError if limits are too low."""
    room = resource.getrlimit(resource.RLIMIT_AS)[0]
    if room != resource.RLIM_INFINITY and room < LEAST_MEMORY:
        raise UserError(
            f"ulimit -v = {room >> 10}: the libraries of a run need at least {LEAST_MEMORY >> 10} KiB, on a GPU many "
            "times as much; remove the limit."
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
    """After some steps, a resource of the node that other programs use too ran out: restarting may help."""

    exit_code = LOST


@dataclass
class Start:
    """A start of a run."""

    has_worked: Callable[[], bool] = lambda: False
    """Whether it has done a step."""


@contextmanager
def worth_another_start() -> Iterator[Start]:
    """A resource that runs out after the first step ends the run with a code that Slurm requeues.

    Before the first step, a restart would end the same way.
    """
    start = Start()
    try:
        yield start
    except Exception as error:
        words = shortage(error)
        if words is None and isinstance(error, UserError) and any(sign in str(error) for sign in _SIGNS):
            words = str(error)  # a checkpoint that could not be written has its own sentence
        if words is None or not start.has_worked():
            raise
        raise RanOutError(words) from error
