"""Where the time goes: seconds of each phase, by the host's clock.

No phase makes the host wait for a GPU.  A step's loss is read by the host, so forward_backward holds the GPU's work;
what the update still has in flight when the host goes on counts as time of the step, but of none of its phases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OUTSIDE = ("evaluation", "checkpoint")
"""Phases that no step contains."""


class Phases:
    """Seconds by phase, in the present step and since the last row."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin at this moment."""
        self._step: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._steps, self._outside, self._begin = 0, 0.0, self._clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time spent inside belongs to this phase of the step."""
        begin = self._clock()
        try:
            yield
        finally:
            self._step[name] = self._step.get(name, 0.0) + self._clock() - begin

    def outside(self, seconds: float) -> None:
        """This much went into something that is no part of a step."""
        self._outside += seconds

    def step(self, computed: float) -> tuple[float, dict[str, float]]:
        """A step ends here: its seconds and those of its phases.

        `computed` seconds of what was measured as `optimizer` were forward and backward, which one call contains.
        """
        now, parts = self._clock(), self._step
        parts["optimizer"] = max(0.0, parts.get("optimizer", 0.0) - computed)
        parts["forward_backward"] = computed
        seconds = max(0.0, now - self._begin - self._outside)
        for name, value in parts.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._step, self._outside, self._begin, self._steps = {}, 0.0, now, self._steps + 1
        return seconds, parts

    def row(self) -> dict[str, float]:
        """Mean seconds of each phase in a step, since the last row."""
        means = {f"{name}_seconds": value / max(1, self._steps) for name, value in self._sums.items()}
        self._sums, self._steps = {}, 0
        return means
