"""Confident exit: PonderLM whose tokens exit as soon as the model is confident of their next token, after Confident
Adaptive Language Modeling (arXiv 2207.07061); a baseline for comparisons at equal FLOPs.

    m^{i+1} = m^i [max softmax(h^i Wo^T) < threshold]

Training exits, too, and `megaponder.ponder.budget` moves the threshold so that a token spends the share `target` of the
passes in the mean.  As for the other methods with a budget, every token runs `least` passes, one (or two) are open, and
a share `explore` of training's decisions is drawn at random:

    least <= target (S + 1) <= least + 1
    m^{i+1} = 1 before pass `least`, m^i [1 - max softmax(h^i Wo^T) >= theta] from there on

Or, with `target: 0.0`: train with threshold 1 (never exits), find the threshold on held-out text
(`benchmarks/calibrate.py`) and evaluate with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.config.declare import declare
from megaponder.ponder.base import ExitTools, Pass, Shape, pass_count, register, token_count
from megaponder.ponder.budget import Budgeted
from megaponder.ponder.halting import at_least, fraction, ordered
from megaponder.ponder.methods.aligned.training import AlignedHalting


@register
class ConfidentPonderLM(Budgeted, AlignedHalting):
    """Early exit by confidence."""

    learns = False

    name = "confident_ponderlm"
    summary = "baseline: ponderlm whose tokens exit once their best next token is likely enough"

    @dataclass
    class Options:
        steps: int = pass_count(3)
        """S: pondering steps; a token runs at most S + 1 passes."""
        threshold: float = declare(1.0, unless="target")
        """Exit when the largest next-token probability reaches this; 1 never exits (without a target)."""
        target: float = declare(0.9, earlier=0.0)
        """Share of the S + 1 passes that a token may spend in the mean, held by a threshold that follows it; 0: the
        threshold above."""
        explore: float = 0.1
        """With a target: share of training's decisions that are drawn at random, so that passes learn from all
        tokens."""
        ramp_start: int = 0
        """With a target: step up to which all tokens run all passes of the window."""
        ramp_end: int = 0
        """With a target: step from which on it is met."""
        topk: int = token_count(0)
        """Tokens in the mixture; 0 means the whole vocabulary."""
        gentle_start: bool = False
        """What is fed back is multiplied by a learned number, as in the ponderlm that the weights come from."""

        def __post_init__(self) -> None:
            at_least(self, "steps", 1)
            at_least(self, "topk", 0)
            fraction(self, "threshold")
            fraction(self, "explore")
            ordered(self, "ramp_start", "ramp_end")

    def __init__(self, options: Any, shape: Shape):
        super().__init__(options, shape)
        self.open_window(options.steps + 1, "passes")

    def exit_modules(self) -> dict[str, nn.Module]:
        return super().exit_modules() | ({} if self.window is None else {"budget": self.gates()})

    def _asks(self, p: Pass) -> bool:
        """Whether confidence decides after a pass."""
        if self.window is None:
            return bool(self.options.threshold < 1) and not p.last
        return not p.last and p.index + 1 >= self.window.least

    def decide(
        self, p: Pass, state: Tensor, active: Tensor, carry: dict[str, Tensor], tools: ExitTools
    ) -> tuple[None, Tensor]:
        if not self._asks(p) and self.forced is None:
            return None, torch.ones_like(active)
        best = tools.broadcast(tools.confidence(state, active))
        if self.forced is not None:
            carry[f"doubt{p.index}"] = 1 - best
        if self.window is None or not self._asks(p):
            return None, best < self.options.threshold
        index = p.index + 1 - self.window.least
        return None, self.decisions(carry, tools).decide(index, active, 1 - best, self.at_random)

    def scores(self, carry: dict[str, Tensor]) -> dict[int, Tensor]:
        return {i + 1: carry[f"doubt{i}"] for i in range(len(self.passes(0, None)) - 1)}

    def sums(self, carry: dict[str, Tensor], tools: ExitTools) -> dict[str, Tensor]:
        return {} if self.window is None else self.decisions(carry, tools).stats()

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        head = 2.0 * vocab_size * self.shape.hidden_size
        return super().extra_flops(p, vocab_size) + (head if self._asks(p) else 0.0)
