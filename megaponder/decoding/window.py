"""Which depths a budget leaves open.

Every token runs `least` passes (rows, for methods with latents), none runs more than `most`, and gates decide about
those between.  A narrow window wastes least: with one open pass no token can be starved or spoilt, whatever the gates
have learned.  Where the budget is nearly a whole number one open pass would leave no choice, so two are open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NEAR = 0.1
"""A budget this close to a whole number of passes opens two."""


@dataclass(frozen=True)
class Window:
    """Depths from `least` to `most`, `mean` on average."""

    least: int
    most: int
    mean: float

    @property
    def gates(self) -> int:
        """Decisions that are open."""
        return self.most - self.least


def window(target: float, deepest: int) -> Window:
    """The window of a budget: the share `target` of `deepest` passes, which is at least one pass."""
    mean = min(max(target * deepest, 1.0), float(deepest))
    width = 2 if abs(mean - round(mean)) < NEAR and 1 < round(mean) < deepest else 1
    least = max(1, min(math.floor(mean - width / 2 + 0.5 + 1e-9), deepest - width))
    return Window(least, min(least + width, deepest), mean)


def scales(hidden: int, inner: int) -> tuple[float, float]:
    """Factors on the first and on the last layer of a score's MLP: its speed under Adam depends on no width."""
    return hidden**-0.5, 8.0 / inner
