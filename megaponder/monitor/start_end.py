"""Seconds that a process spends outside its steps, by phase: before its first step is done, and after its last save.

Every short run pays them.  `starting` and `ending` are called where a phase begins; phases with the same name add up.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

START = (
    "imports", "configuration", "processes", "data", "model", "optimizer", "checkpoint", "monitor", "first_step",
)  # fmt: skip
"""`imports` contains the interpreter's own start; `processes` the process groups, and so the wait for the slowest rank;
`data` opening the datasets; `model` building and initialising it; `checkpoint` loading the newest one and preparing to
save; `monitor` files, trackers and the endpoint."""
END = ("engine", "monitor", "processes")
"""`engine` releases captured passes, `monitor` closes files and trackers, `processes` leaves the process groups."""


class Phases:
    """Seconds by phase from `since` on, by time.monotonic()."""

    def __init__(self, phase: str, since: float):
        self._phase, self._since = phase, since
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        """The current phase ends and this one begins."""
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def end(self) -> dict[str, float]:
        """Seconds by phase, up to now."""
        self.enter(self._phase)
        return self._seconds


_start: Phases | None = None
_started = False
_end: Phases | None = None


def starting(phase: str) -> None:
    """A phase of this process's start begins; ignored after its first step."""
    global _start
    assert phase in START, phase
    if _started:
        return
    if _start is None:
        _start = Phases("imports", time.monotonic() - _age())
    _start.enter(phase)


def started() -> dict[str, float] | None:
    """Seconds of the start by phase; None unless this is the end of the process's first step."""
    global _started
    if _started or _start is None:
        return None
    _started = True
    return _start.end()


def ending(phase: str) -> None:
    """A phase of a run's end begins; `END[0]` is the first of a run."""
    global _end
    assert phase in END, phase
    if phase == END[0]:
        _end = Phases(phase, time.monotonic())
    elif _end is not None:
        _end.enter(phase)


def ended() -> dict[str, float] | None:
    """Seconds of the end by phase; None if no run has come to its end."""
    global _end
    phases, _end = _end, None
    return phases.end() if phases else None


def sentence(what: str, seconds: dict[str, float]) -> str:
    """`what` and the phases, in the order in which they began."""
    parts = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in seconds.items())
    return f"{sum(seconds.values()):.1f} s {what}: {parts}."


def _age() -> float:
    """Seconds since this process was made; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        made = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(made) / os.sysconf("SC_CLK_TCK"))
    return 0.0
