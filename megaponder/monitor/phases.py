"""The phase clock: what this rank is doing, since when, and how long each phase took.

A rank is in exactly one phase at a time; entering one ends the one before.  Console, metrics, Prometheus, the hang
reports and the straggler comparison all read this clock, so they all use these words.

No phase makes the host wait for a GPU.  The host reads each step's loss, so `forward_backward` contains the GPU's work;
what the optimizer still has in flight counts in the phase in which the host next waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

STEP = ("data", "agree", "forward_backward", "optimizer", "report")
"""The phases of a step, in order.  In `agree` the ranks ask each other whether to stop; `report` follows the
update: judging the step, publishing a finished checkpoint, writing a row."""
OUTSIDE = ("evaluation", "checkpoint")
"""Phases that interrupt training: the time of a step excludes them."""
PHASES = ("start", *STEP, *OUTSIDE)
"""`start` lasts from the creation of the clock to the first step, and again while a run goes back to a checkpoint."""


class Now(NamedTuple):
    """A rank's current phase."""

    step: int
    phase: str
    since: float
    """By the clock's own time, in seconds."""


class PhaseClock:
    """One rank's phases.  Other threads may read `now` at any time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.now = Now(0, "start", clock())
        self.listeners: list[Callable[[Now, Now], None]] = []
        """Called with the phase that has ended and the one that starts, by the thread that enters it."""
        self._lap: dict[str, float] = {}

    def enter(self, phase: str, step: int | None = None) -> None:
        """This rank enters `phase`, of the same step unless another is given.

        Entering the current phase again shows progress: `now.since` restarts.
        """
        assert phase in PHASES, phase
        before = self.now
        self.now = now = Now(before.step if step is None else step, phase, self._clock())
        self._lap[before.phase] = self._lap.get(before.phase, 0.0) + now.since - before.since
        for listener in self.listeners:
            listener(before, now)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase that interrupts the current one, which resumes afterwards."""
        interrupted = self.now.phase
        self.enter(name)
        yield
        self.enter(interrupted)

    def lap(self) -> dict[str, float]:
        """Seconds spent in each phase since the last call, up to now."""
        self.enter(self.now.phase)
        lap, self._lap = self._lap, {}
        return lap

    def idle(self) -> float:
        """Seconds since the current phase was entered."""
        return self._clock() - self.now.since
