"""PonderLM-2: every token thinks K latent thoughts, states of the stack that are fed back as rows of their own.

    rows of token t: c We[id_t], z_1 .. z_K (token-major, all at position t);   h = N(Stack(rows))
    K initial passes, of 1 .. K rows a token:  z_1 .. z_{k+1} <- h_0 .. h_k
    J Jacobi refinements of K + 1 rows:        z_1 .. z_K <- h_0 .. h_{K-1}
    final pass:                                logits = h_K Wo^T

Every gradient flows.  `softmax_feedback` feeds softmax(h Wo^T) (c We) instead of h.  Source: arXiv 2509.23184 and its
code.  That draws J for every forward call and rank; here it is drawn from (seed, step), the same on all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megaponder.ponder.base import (
    ExitTools,
    Flow,
    Pass,
    Readout,
    Shape,
    register,
    token_count,
)
from megaponder.ponder.halting import at_least
from megaponder.ponder.methods.latents.training import LatentMethod, LatentOptions


@register
class PonderLM2(LatentMethod):
    """Latent thoughts."""

    name = "ponderlm2"
    summary = "latents extra rows per token, refined by jacobi parallel iterations"

    @dataclass
    class Options(LatentOptions):
        softmax_feedback: bool = False
        """Feed back the expected embedding instead of the state (the official `interpolation`)."""
        topk: int = token_count(0)
        """Tokens in that mixture; 0 means the whole vocabulary."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(self, "topk", 0)

    def __init__(self, options: Any, shape: Shape):
        super().__init__(options, shape)
        self.mixes_vocabulary = options.softmax_feedback
        self.final_reads = (options.latents,)

    def embedding_scale(self) -> float:
        return math.sqrt(self.shape.hidden_size) if self.options.softmax_feedback else super().embedding_scale()

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        h = tools.norm(rows)
        latents = tools.mixture(h, self.options.topk) if self.options.softmax_feedback else h
        self._watch(p, latents, carry, tools)
        return Flow(latents)

    def readout(
        self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools
    ) -> Readout:
        return Readout(tools.norm(rows), stats=self._residuals(carry))

    def decides(self) -> bool:
        return bool(self.options.topk > 0)

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        if p.last or not self.options.softmax_feedback:
            return 0.0
        h = self.shape.hidden_size
        return p.feedback_slots * (2.0 * vocab_size * h + 2.0 * min(self.options.topk or vocab_size, vocab_size) * h)
