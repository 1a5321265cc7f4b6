"""The progress display of `prepare`: a live line in a terminal, a plain one every ten seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megaponder.data.prepare import PrepareProgress

LOG_SECONDS = 10.0


def describe(p: PrepareProgress) -> str:
    """One line: how much is done, how fast, how long remains."""
    rate = p.text_bytes / max(p.seconds, 1e-9)
    left = p.seconds * (p.total_bytes - p.read_bytes) / p.read_bytes if p.read_bytes else 0.0
    return (
        f"{100 * p.read_bytes / max(1, p.total_bytes):5.1f} %  {p.documents:,} documents  {p.tokens:,} tokens  "
        f"{rate / 1e6:.1f} MB/s  {left:.0f} s left"
    )


@contextmanager
def reading(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback (done, of how many) that shows a bar in a terminal and nothing in a log."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(30), TaskProgressColumn(), TextColumn(what), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def show_progress() -> Iterator[Callable[[PrepareProgress], None]]:
    """Yields the callback for `prepare`; writes to standard error."""
    if not sys.stderr.isatty():
        last = time.monotonic()

        def log(p: PrepareProgress) -> None:
            nonlocal last
            if time.monotonic() - last >= LOG_SECONDS:
                last = time.monotonic()
                print(describe(p), file=sys.stderr, flush=True)

        yield log
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(BarColumn(30), TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda p: bar.update(task, description=describe(p), completed=p.read_bytes, total=p.total_bytes)
