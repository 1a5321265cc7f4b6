"""What a pipeline stage holds at once: passes of micro-batches between forward and backward.

Counted by following the order of megatron-core's schedules: all passes of a micro-batch if there is one stage, 1F1B for
one pass, interleaved 1F1B with groups of micro-batches otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class InFlight:
    """Peak counts on one stage."""

    passes: int
    """Passes, of all micro-batches."""
    micro_batches: int
    """Micro-batches between the forward and the backward of their first pass."""
    of_pass: tuple[int, ...]
    """Micro-batches between the forward and the backward of each pass."""

    @property
    def places(self) -> tuple[int, ...]:
        """For each pass: the number of buffers for its micro-batches, so that micro-batch i can always use i modulo
        that.

        Micro-batches go through a pass in order, so any number of buffers of at least `of_pass` works; with divisors of
        `micro_batches` the buffer follows from i modulo `micro_batches`.
        """
        divisors = [n for n in range(1, self.micro_batches + 1) if self.micro_batches % n == 0]
        return tuple(next(n for n in divisors if n >= most) for most in self.of_pass)


@lru_cache
def in_flight(stage: int, stages: int, passes: int, micro_batches: int, group: int) -> InFlight:
    """Of stage `stage` of `stages`; `group`: micro-batches that run through a pass before the next pass starts."""
    settled = (4 * stages + 4) * group  # further groups of micro-batches repeat the same pattern; a test compares
    if micro_batches > settled:
        micro_batches = settled + micro_batches % group
    return counted(stage, stages, passes, micro_batches, group)


def counted(stage: int, stages: int, passes: int, micro_batches: int, group: int) -> InFlight:
    """The same, simulating all micro-batches."""
    now, most, most_passes = [0] * passes, [0] * passes, 0
    for forward, p in _order(stage, stages, passes, micro_batches, group):
        now[p] += 1 if forward else -1
        most[p] = max(most[p], now[p])
        most_passes = max(most_passes, sum(now))
    return InFlight(most_passes, most[0], tuple(most))  # whatever has left the first pass has left all passes


@lru_cache
def largest_sum(stage: int, stages: int, kept: tuple[float, ...], micro_batches: int, group: int) -> float:
    """The most that a stage holds at once, if a micro-batch keeps so much of each pass until its backward."""
    passes = len(kept)
    micro_batches = min(micro_batches, (4 * stages + 4) * group + micro_batches % group)
    now = most = 0.0
    for forward, p in _order(stage, stages, passes, micro_batches, group):
        now += kept[p] if forward else -kept[p]
        most = max(most, now)
    return most


def _order(stage: int, stages: int, passes: int, micro_batches: int, group: int) -> Iterator[tuple[bool, int]]:
    """(whether forward, pass) in the order of the schedule."""
    if stages == 1:
        for _ in range(micro_batches):
            yield from ((True, p) for p in range(passes))
            yield from ((False, p) for p in reversed(range(passes)))
        return
    sizes = [min(group, micro_batches - i) for i in range(0, micro_batches, group)]
    order = [p for size in sizes for p in range(passes) for _ in range(size)]
    ahead = stages - stage - 1 if passes == 1 else (stages - stage - 1) * 2 + (passes - 1) * group
    for i in range(len(order) + ahead):
        if i < len(order):
            yield True, order[i]
        if i >= ahead:
            yield False, passes - 1 - order[i - ahead]
