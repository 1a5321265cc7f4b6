"""Fixed pruning: PonderLM with a fixed number of passes for each position, at random or evenly spaced, at a chosen mean
depth; a baseline for comparisons at equal FLOPs.

Fewer passes for all tokens are `ponderlm` with fewer `steps`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megaponder.errors import ConfigError
from megaponder.ponder.base import ExitTools, Pass, pass_count, register, token_count
from megaponder.ponder.budget import mixed
from megaponder.ponder.halting import at_least
from megaponder.ponder.methods.aligned.training import AlignedHalting


def spread(positions: Tensor, seed: int) -> Tensor:
    """Numbers in [0, 1) that look random, one for each position."""
    return mixed((positions.long() + 1) * 0x9E3779B1 + (seed + 1) * 0x85EBCA6B)


def fixed_depth(positions: Tensor, mean: float, by: str, seed: int) -> Tensor:
    """Passes of each position: floor(mean) or one more, so that their mean is `mean`.

    `random` gives the extra pass to positions at random, `position` to evenly spaced ones.
    """
    base, extra = int(mean), mean - int(mean)
    if by == "random":
        chosen = spread(positions, seed) < extra
    else:
        t = positions.double()
        chosen = torch.floor((t + 1) * extra) > torch.floor(t * extra)
    return base + chosen.long()


@register
class PrunedPonderLM(AlignedHalting):
    """Fixed pruning."""

    name = "pruned_ponderlm"
    chooses = False
    summary = "baseline: ponderlm with a fixed number of passes for each position, depth on average"

    @dataclass
    class Options:
        steps: int = pass_count(3)
        """S: pondering steps; a position runs at most S + 1 passes."""
        depth: float = 3.7
        """Mean number of passes of a token."""
        by: str = "random"
        """Who gets one pass more: random or position (evenly spaced)."""
        seed: int = 0
        """Of the random choice."""
        topk: int = token_count(0)
        """Tokens in the mixture; 0 means the whole vocabulary."""

        def __post_init__(self) -> None:
            at_least(self, "steps", 1)
            at_least(self, "topk", 0)
            if not 1 <= self.depth <= self.steps + 1:
                rule = f"it must lie between 1 and steps + 1 = {self.steps + 1}"
                nearest = min(max(self.depth, 1.0), self.steps + 1.0)
                raise ConfigError("ponder.options.depth", self.depth, rule, f"use {nearest}")
            if self.by not in ("random", "position"):
                raise ConfigError("ponder.options.by", self.by, "it must be random or position", "use random")

    def decide(
        self, p: Pass, state: Tensor, active: Tensor, carry: dict[str, Tensor], tools: ExitTools
    ) -> tuple[None, Tensor]:
        o = self.options
        return None, fixed_depth(tools.positions_sb, o.depth, o.by, o.seed) > p.index + 1
