"""Learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaponder.config.schema import OptimizerConfig, ScheduleConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then a decay to `floor` that ends with the budget."""

    kind: str
    peak: float
    floor: float
    warmup: int
    """Steps of warm-up; the last of them runs at the peak."""
    decay: int
    """Steps of the final decay of wsd; the other kinds decay from the end of warm-up."""
    total: int
    """Steps of the whole budget."""

    def __call__(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 1; the last step of the budget is `total`."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        fall = self.decay if self.kind == "wsd" else self.total - self.warmup
        left = max(0, self.total - step)
        part = min(1.0, left / fall) if fall > 0 else 1.0  # 1 at the start of the decay, 0 at its end
        if self.kind == "constant":
            return self.peak
        if self.kind == "cosine":
            part = 0.5 * (1 - math.cos(math.pi * part))
        return self.floor + (self.peak - self.floor) * part


def build_schedule(schedule: ScheduleConfig, optimizer: OptimizerConfig, total_steps: int) -> Schedule:
    """The schedule of a run whose budget is `total_steps`; warm-up and decay are rounded to steps."""
    return Schedule(
        kind=schedule.kind,
        peak=optimizer.lr,
        floor=optimizer.lr * schedule.min_lr_fraction,
        warmup=round(schedule.warmup_fraction * total_steps),
        decay=round(schedule.decay_fraction * total_steps),
        total=total_steps,
    )
