"""Which node is slower than the others: each rank's own time, exchanged when a row is written.

In synchronous training every rank needs the same time for a step, because it waits for the slowest.  A rank's own time
is what it needs before it first waits for its data-parallel peers: reading its data, and forward and backward up to the
reduction of gradients.  Ranks of one pipeline or tensor group wait for each other, so they are slow together.
"""

from __future__ import annotations

import socket
import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist


class Stragglers:
    """Sums this rank's own time and compares the means of all nodes, or of all ranks if there is only one node."""

    def __init__(self, ratio: float, device: torch.device):
        self.ratio, self.device = ratio, device
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        several = len(set(hosts)) > 1
        self.places = [host if several else f"rank {rank}" for rank, host in enumerate(hosts)]
        self._seconds, self._steps = [0.0, 0.0], 0
        self._slow: str | None = None
        """The node or rank that was slow at the previous report: a single report may be chance."""

    def stepped(self, data: float, compute: float) -> None:
        """A step has ended: seconds that this rank waited for its data, and seconds of its own computation."""
        self._seconds[0] += data
        self._seconds[1] += compute
        self._steps += 1

    def report(self) -> tuple[dict[str, float], str | None]:
        """Metrics of the row, and a sentence if a node is slow again; starts a new interval.  A collective."""
        mine = torch.tensor(self._seconds, dtype=torch.float64, device=self.device) / max(1, self._steps)
        self._seconds, self._steps = [0.0, 0.0], 0
        every = [torch.zeros_like(mine) for _ in self.places]
        dist.all_gather(every, mine)
        found = slowest(self.places, [t.tolist() for t in every])
        if found is None:
            return {}, None
        before, self._slow = self._slow, found.place if found.slowdown >= self.ratio else None
        again = self._slow is not None and self._slow == before
        return {"straggler_slowdown": found.slowdown}, found.sentence() if again else None


@dataclass(frozen=True)
class Slowest:
    """The node whose own time is longest; seconds a step."""

    place: str
    data: float
    compute: float
    slowdown: float
    """Its own time over the median of the others."""

    def sentence(self) -> str:
        """For the log."""
        return (
            f"{self.place} is slow: {self.data + self.compute:.3g} s of its own per step (data {self.data:.3g}, "
            f"compute {self.compute:.3g}), {self.slowdown:.2f} times the median of the others."
        )


def slowest(places: list[str], seconds: list[list[float]]) -> Slowest | None:
    """From every rank's seconds (data, compute); a node is as slow as its slowest rank.  None: nothing to compare."""
    by_place: dict[str, list[float]] = {}
    for place, own in zip(places, seconds, strict=True):
        by_place[place] = max(by_place.get(place, own), own, key=sum)
    times = {place: sum(own) for place, own in by_place.items()}
    worst = max(times, key=lambda place: times[place])
    others = statistics.median(time for place, time in times.items() if place != worst) if len(times) > 1 else 0.0
    data, compute = by_place[worst]
    return Slowest(worst, data, compute, times[worst] / others) if others > 0 else None
