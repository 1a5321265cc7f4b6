"""Thresholds that are fitted to a mean depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megaponder.config.schema import RunConfig
from megaponder.inference.heldout import Reading, decided, together

if TYPE_CHECKING:
    from megaponder.engine.step import Engine

CLOSE = 0.005
"""Passes by which a fitted mean depth may be off."""


def fit_threshold(
    engine: Engine,
    cfg: RunConfig,
    prefixes: Sequence[str],
    depth: float,
    reading: Reading,
    tries: int = 16,
    known: dict[float, float] | None = None,
) -> float:
    """The threshold at which the targets of each dataset have this mean depth, as nearly as one has it.

    By bisection of the threshold's logit.  The engine holds the model of `cfg` and is left with that threshold.
    `known` are mean depths of the same model and data by logit, and gets those that are measured.
    """
    options, known = engine.stage.method.options, {} if known is None else known

    def measured(logit: float) -> float:
        options.threshold = 1 / (1 + math.exp(-logit))
        if logit not in known:
            parts = [decided(engine, cfg, prefix, reading) for prefix in prefixes]
            known[logit] = together(parts).stats["mean_depth"]
        return known[logit]

    measured(nearest(measured, -20.0, 20.0, depth, tries, within=CLOSE))
    return float(options.threshold)


def nearest(
    measured: Callable[[float], float], low: float, high: float, aim: float, tries: int = 16, within: float = 0.0
) -> float:
    """Where a monotone function between `low` and `high` comes closest to `aim`, or `within` it, by bisection."""
    rises = measured(high) > measured(low)  # a higher threshold is a later exit by confidence, but a shut gate
    for _ in range(tries):
        middle = (low + high) / 2
        found = measured(middle)
        if abs(found - aim) <= within:
            return middle
        low, high = (low, middle) if (found > aim) == rises else (middle, high)
    return min((low, high), key=lambda x: abs(measured(x) - aim))
