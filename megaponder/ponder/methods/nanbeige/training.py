"""Nanbeige loops: a Llama stack runs several times, and the final norm closes each loop.

    h_t = N(Stack(h_{t-1})),  h_0 = c We[ids],  t = 1..T;  logits = h_T Wo^T
    without `norm_between`:  h_t = Stack(h_{t-1}),  logits = N(h_T) Wo^T
    loss = (1 - sum_t w_t) CE_T + sum_t w_t CE_t,  t = 1..T-1  (`loss_weights`; none: CE_T)

With `middle` M (LoopSplit) a loop runs the layers before and after the M in the middle once, and those
(layers + M) / M times, so that it executes twice as many layers as there are.  With `share_kv` these repetitions attend
to the keys and values of the layer's first execution in the loop, with new queries (in training their own are
computed, too, and not used).  Published: the forward (Nanbeige4.2's modelling file), and the names of the other
options, which its released model does not use; what the loss weights mean is an assumption.  Not here:
hyper-connections, depth attention.
Source: the files of Nanbeige4.2-3B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megaponder.config.declare import declare
from megaponder.errors import ConfigError
from megaponder.ponder.base import (
    MOST_PASSES,
    CoreAttention,
    EntryTools,
    ExitTools,
    Flow,
    Method,
    Pass,
    Readout,
    Shape,
    pass_count,
    register,
)
from megaponder.ponder.halting import at_least


@register
class Nanbeige(Method):
    """Loops of the whole stack, closed by the final norm."""

    name = "nanbeige"
    summary = "a Llama stack runs loops times, each loop closed by the final norm"

    @dataclass
    class Options:
        loops: int = pass_count(2)
        """T: loops of the stack."""
        norm_between: bool = declare(True, resume="refused", load="warned")
        """The final norm closes every loop, not only the last."""
        loss_weights: list[float] = declare([])
        """Weights of the losses of loops 1 .. T - 1, together at most 1; the last loop has the rest."""
        middle: int = declare(0, le=MOST_PASSES, resume="refused", load="warned")
        """M: layers in the middle that a loop repeats; 0: the loop is the plain stack."""
        share_kv: bool = declare(False, resume="refused", load="warned")
        """With `middle`: repetitions in a loop use the keys and values of the layer's first execution."""

        def __post_init__(self) -> None:
            at_least(self, "loops", 1)
            at_least(self, "middle", 0)
            if self.share_kv and not self.middle:
                rule = "only with middle does a loop repeat layers"
                raise ConfigError("ponder.options.share_kv", True, rule, "use false, or set middle")
            weights, field = self.loss_weights, "ponder.options.loss_weights"
            if weights and len(weights) != self.loops - 1:
                rule = f"it must have one number for each of the {self.loops - 1} loops before the last"
                raise ConfigError(field, weights, rule, "use [] for the last loop's loss alone")
            if not (all(type(w) in (int, float) and w >= 0 for w in weights) and sum(weights) <= 1):
                raise ConfigError(field, weights, "they must be numbers from 0 on, together at most 1", "use []")

    def __init__(self, options: Any, shape: Shape):
        super().__init__(options, shape)
        self.reads_every_pass, self.keeps_kv = bool(options.loss_weights), options.share_kv
        m, layers = options.middle, shape.num_layers
        if m:
            legal = [n for n in range(1, layers) if layers % n == 0 and (layers - n) % 2 == 0]
            if m not in legal:
                rule = f"it must divide the {layers} layers and leave as many before as after"
                raise ConfigError("ponder.options.middle", m, rule, f"use one of {legal}" if legal else "use 0")
            self.core = (layers - m) // 2, (layers + m) // 2

    @property
    def repeats(self) -> int:
        """Passes of a loop."""
        return (self.shape.num_layers + self.options.middle) // self.options.middle if self.options.middle else 1

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        r, last = self.repeats, self.options.loops * self.repeats - 1
        begin, end = self.core or (0, self.shape.num_layers)
        parts = [(begin if i % r else 0, self.shape.num_layers if i % r == r - 1 else end) for i in range(last + 1)]
        return tuple(Pass(i, i == last, layers=parts[i] if self.core else None) for i in range(last + 1))

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        return Flow(tools.embed(ids_bn)) if feedback is None else feedback

    def attend(
        self,
        p: Pass,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        riders: Tensor | None,
        kept: tuple[Tensor, ...],
        core: CoreAttention,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not (self.options.share_kv and self.core and self.core[0] <= core.layer < self.core[1]):
            return core(q, k, v), ()
        repetition = p.index % self.repeats
        if repetition:
            k, v = kept
        return core(q, k, v), (k, v) if repetition < self.repeats - 1 else ()

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        loop, inner = divmod(p.index, self.repeats)
        if inner != self.repeats - 1:
            return Flow(rows)
        h = tools.norm(rows)
        if self.options.loss_weights:
            share = self.options.loss_weights[loop] * tools.losses(h)
            carry["early"] = carry["early"] + share if "early" in carry else share
        return Flow(h if self.options.norm_between else rows)

    def readout(
        self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools
    ) -> Readout:
        h = tools.norm(rows)
        if "early" not in carry:
            return Readout(h)
        losses = tools.losses(h)
        rest = (1.0 - sum(self.options.loss_weights)) * losses
        return Readout(h, losses=losses, loss=rest + carry["early"])

    def training_flops(self, p: Pass, vocab_size: int) -> float:
        closes = p.index % self.repeats == self.repeats - 1 and not p.last
        return 6.0 * vocab_size * self.shape.hidden_size if closes and self.options.loss_weights else 0.0
