"""A budget's threshold, set anew on held-out text: `megaponder export --refit`.

Training moves the threshold from step to step, on training text; what it leaves behind is within some hundredths of
the passes on other text, as long as this is of the same kind.  On a given text one threshold meets the budget best.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError
from megaponder.export import reference
from megaponder.export.to_hf import Refitted
from megaponder.inference.fit import nearest
from megaponder.inference.heldout import Reading, datasets, score
from megaponder.inference.variants import STATE
from megaponder.ponder.budget import MEAN, THETA, VARIANCE
from megaponder.ponder.settings import method_of

CLOSE = 0.005
"""Passes from the budget at which the search ends."""


def refit(
    cfg: RunConfig, state: dict[str, Tensor], dtype: torch.dtype, *, prefix: str, tokens: int = 16384, batch: int = 8
) -> Refitted:
    """Replace the threshold in `state` by the one at which the first `tokens` targets of a dataset meet the budget.

    The threshold is one that `dtype` holds exactly.  ConfigError for a model without a budget, and for a dataset that
    is not for this model.
    """
    window = method_of(cfg).window
    if window is None:
        rule = f"method {cfg.ponder.method} has no budget that a threshold could meet (ponder.options.target)"
        raise ConfigError("--refit", prefix, rule, "leave it out")
    [(name, text)] = datasets(cfg, [prefix], "--refit").items()
    state[STATE] = found = state[STATE].float()  # a copy, unless it is one already
    with reference.engine(cfg, state) as engine:
        threshold: Tensor = engine.stage.method_modules.get_parameter("budget.state").data
        seen: dict[float, tuple[float, int]] = {}

        def measured(theta: float) -> float:
            threshold[THETA] = theta = float(torch.tensor(theta).to(dtype))
            if theta not in seen:
                result = score(engine, cfg, text, Reading(batch, limit=tokens))
                seen[theta] = (result.stats["mean_depth"], result.targets)
            return seen[theta][0]

        start, width = float(found[THETA]), max(float(found[VARIANCE]) ** 0.5, 1e-3)
        if abs(start) > 1e3:  # before the ramp every token goes on
            start = float(found[MEAN])
        before = measured(float(found[THETA]))
        low, high = start - width, start + width
        for _ in range(20):
            if measured(low) >= window.mean:
                break
            low, width = low - width, 2 * width
        for _ in range(20):
            if measured(high) <= window.mean:
                break
            high, width = high + width, 2 * width
        theta = float(torch.tensor(nearest(measured, low, high, window.mean, within=CLOSE)).to(dtype))
    found[THETA] = theta
    after, targets = seen[theta]
    return Refitted(Path(name).name, targets, window.mean, before, after, theta)
