"""Confident exit: PonderLM whose tokens exit as soon as the model is confident of their next token, after Confident
Adaptive Language Modeling (arXiv 2207.07061); a baseline for comparisons at equal FLOPs.

Train with threshold 1 (never exits), calibrate the threshold on held-out text (`benchmarks/calibrate.py`), and evaluate
with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megaponder.ponder.base import ExitTools, Pass, pass_count, register, token_count
from megaponder.ponder.halting import at_least, fraction
from megaponder.ponder.methods.aligned.training import AlignedHalting


@register
class ConfidentPonderLM(AlignedHalting):
    """Early exit by confidence."""

    name = "confident_ponderlm"
    summary = "baseline: ponderlm whose tokens exit once their best next token is likely enough"

    @dataclass
    class Options:
        steps: int = pass_count(3)
        """S: pondering steps; a token runs at most S + 1 passes."""
        threshold: float = 1.0
        """Exit when the largest next-token probability reaches this; 1 never exits (use it for training)."""
        topk: int = token_count(0)
        """Tokens in the mixture; 0 means the whole vocabulary."""

        def __post_init__(self) -> None:
            at_least(self, "steps", 1)
            at_least(self, "topk", 0)
            fraction(self, "threshold")

    def decide(
        self, p: Pass, state: Tensor, active: Tensor, carry: dict[str, Tensor], tools: ExitTools
    ) -> tuple[None, Tensor]:
        if self.options.threshold >= 1.0:
            return None, torch.ones_like(active)
        return None, tools.broadcast(tools.confidence(state)) < self.options.threshold
