"""PonderLM (v1): each pass adds the expected next-token embedding to the input of the following one.

    E = c We[ids];  S times:  h = N(Stack(E)),  E = E + softmax(h Wo^T) (c We);  logits = N(Stack(E)) Wo^T

`feedback` has the paper's two controls, which add the state itself, or a learned projection of it, instead of the
expected embedding (perplexities 15.64, 15.64 and 14.16 at 70M):

    hidden: E = E + h;   projected: E = E + W h + b

Every gradient flows, nothing is detached.  `topk` keeps the k most probable tokens (renormalised), as the paper's
footnote says; the official code mixes the whole vocabulary.  `multiply_by_steps` is the official code's xS on the
first embedding.  W starts as PyTorch's linear layers do (this project's choice).  The paper also trains with S drawn
for each batch, uniformly from 1 to 10 (`draw: uniform`, `draw_to: 10`): more steps then help in inference.  Drawing in
other ways is an own choice (formulas in `megaponder/ponder/drawn.py`).  Source: arXiv 2505.20674.

`accumulate: false` is the PonderLM baseline of PonderLM-2's code for Llama: E = c We[ids] + the newest mixture alone.
`gentle_start` is this project's: what is fed back is multiplied by one learned number g, which starts at 0; with c = 1
(what `auto` then means) the model begins as the vanilla one that its weights come from (docs/gentle-start.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megaponder.config.declare import declare
from megaponder.decoding.feedback import FeedbackGate
from megaponder.errors import ConfigError
from megaponder.ponder.base import (
    EntryTools,
    ExitTools,
    Flow,
    Method,
    Pass,
    Shape,
    depth_scaled,
    pass_count,
    register,
    repeated,
    token_count,
)
from megaponder.ponder.drawn import DrawnOptions
from megaponder.ponder.halting import one_of


@register
class PonderLM(Method):
    """Pondering with expected embeddings."""

    name = "ponderlm"
    summary = "steps passes that each add the expected next-token embedding, then one that predicts"

    @dataclass
    class Options(DrawnOptions):
        steps: int = pass_count(3)
        """S: pondering steps, in evaluation and, where none are drawn, in training; the model runs S + 1 passes."""
        topk: int = token_count(0)
        """Tokens in the mixture; 0 means the whole vocabulary."""
        multiply_by_steps: bool = declare(False, resume="refused", load="warned")
        """Multiply the token embedding by S, also where another number is drawn (true in the official 410M, 1B and 1.4B
        scripts)."""
        feedback: str = declare("mixture", resume="refused", load="warned")
        """What a pass adds to the input of the next: mixture (the expected embedding), hidden (the final-normed state),
        or projected (a linear map of that state)."""
        accumulate: bool = declare(True, resume="refused", load="warned")
        """Add up the mixtures of all steps; false: the token embedding plus the newest one."""
        gentle_start: bool = False
        """Multiply what is fed back by a learned number that starts at 0: a trained vanilla model keeps its loss."""

        def __post_init__(self) -> None:
            if self.steps < 1:
                raise ConfigError(
                    "ponder.options.steps", self.steps, "it must be at least 1", "use 1, or method vanilla"
                )
            if self.topk < 0:
                raise ConfigError(
                    "ponder.options.topk", self.topk, "it must not be negative", "use 0 for the full vocabulary"
                )
            self.check_draw(self.steps)
            one_of(self, "feedback", ("mixture", "hidden", "projected"))
            if self.topk and self.feedback != "mixture":
                rule = f"with ponder.options.feedback = {self.feedback} there is no mixture"
                raise ConfigError("ponder.options.topk", self.topk, rule, "use 0")
            if self.gentle_start and self.multiply_by_steps:
                rule = "with gentle_start the first embedding must be that of the vanilla model"
                raise ConfigError("ponder.options.multiply_by_steps", True, rule, "use false")

    def __init__(self, options: Any, shape: Shape):
        super().__init__(options, shape)
        self.feedback = getattr(options, "feedback", "mixture")  # methods with halting tokens have mixtures only
        self.mixes_vocabulary = self.feedback == "mixture"
        self.gentle = getattr(options, "gentle_start", False)
        """There is a feedback gate; not all methods that build on this one have the option."""

    def check_run(self) -> None:
        if isinstance(self.options, DrawnOptions):  # methods with halting tokens draw nothing
            self.options.check_drawn("steps")

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        return repeated(self.options.number(self.options.steps, seed, step))

    def longest(self, seed: int) -> tuple[Pass, ...]:
        return repeated(self.options.most(self.options.steps))

    def embedding_scale(self) -> float:
        return 1.0 if self.gentle else math.sqrt(self.shape.hidden_size)

    def initialisation(self) -> tuple[str, float]:
        return depth_scaled(self.shape, self.options.steps + 1 if self.shape.neox_recipe else 1)

    def exit_modules(self) -> dict[str, nn.Module]:
        h, made = self.shape.hidden_size, dict[str, nn.Module]()
        if self.feedback == "projected":
            made["projection"] = nn.Linear(h, h)
        if self.gentle:
            made["feedback_gate"] = FeedbackGate()
        return made

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        if feedback is None:
            rows = tools.embed(ids_bn, factor=float(self.options.steps) if self.options.multiply_by_steps else 1.0)
        else:
            rows = carry["embedding"] + feedback.rows
        if feedback is None or (self.options.accumulate and not p.last):
            carry["embedding"] = rows
        return Flow(rows)

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        h = tools.norm(rows)
        if self.feedback == "mixture":
            h = tools.mixture(h, self.options.topk)
        elif self.feedback == "projected":
            h = tools.modules["projection"](h)
        return Flow(self.gated(h, tools))

    def gated(self, rows: Tensor, tools: ExitTools) -> Tensor:
        """What is fed back, times the feedback gate if there is one."""
        gated: Tensor = tools.modules["feedback_gate"](rows) if self.gentle else rows
        return gated

    def decides(self) -> bool:
        return bool(self.options.topk > 0)

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        return self.feedback_flops(p, vocab_size)

    def feedback_flops(self, p: Pass, vocab_size: int) -> float:
        if p.last:
            return 0.0
        h = self.shape.hidden_size
        if self.feedback != "mixture":
            return 2.0 * h**2 if self.feedback == "projected" else 0.0
        return (
            2.0 * vocab_size * h + 2.0 * min(self.options.topk or vocab_size, vocab_size) * h
        )  # logits, then the mixture
