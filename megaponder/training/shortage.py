"""Descriptors, processes and threads that run out: refused at the start, and worth another start in mid-run."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megaponder.errors import LOST, UserError, shortage

NEEDED = 256
"""Descriptors that a process of a small run may need: libraries, connections to other ranks, data, checkpoints."""
WANTED = 1 << 16


def raise_descriptors() -> None:
    """Raise this process's limit of descriptors as far as it may, up to `WANTED`; UserError where it is too low."""
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


@contextmanager
def worth_another_start(has_worked: Callable[[], bool]) -> Iterator[None]:
    """What runs out once a start has done a step ends it with a code that Slurm requeues.

    A start that has done none would end the same way the next time.
    """
    try:
        yield
    except Exception as error:
        if has_worked() and (words := shortage(error)) is not None:
            raise RanOutError(words) from error
        raise
