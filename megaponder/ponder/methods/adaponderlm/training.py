"""AdaPonderLM: PonderLM whose tokens stop pondering when their gate says so.

    h^i = N(Stack(E^i)), of a halted token the last active one
    s^i = sigmoid(MLP_i(h^i));   m^0 = 1,  m^{i+1} = m^i [s^i >= tau]
    E^{i+1} = E^i + m^{i+1} s^i softmax(h^i Wo^T) (c We)
    keys and values of a halted token: those of the pass in which it halted
    loss = CE + weight * mean of the smallest share k_s of the gates;  k_s ramps from 0 to bottom_share

The paper's cost does not hold its budget: asked to save 10 % of the passes, runs saved 21 to 67 %, one gate shut for
nearly all tokens within ten steps of the ramp's start, and it never came back, for the gate of a halted token gets no
gradient.  So that is the form with `target: 0.0`.  With a target, which is the default, the gates are those of
`megaponder.ponder.budget`, which hold theirs: a token runs `least` passes, and one (or two) more where the score says
so; s is 1, and the only cost is the scores' error:

    least <= target (S + 1) <= least + 1
    m^{i+1} = 1 before pass `least`, m^i [g^i >= theta] from there on
    E^{i+1} = E^i + m^{i+1} softmax(h^i Wo^T) (c We)
    loss = CE + weight * mean of (g^i - (l^i - l^{i+1}) / sigma)^2 over the tokens that ran pass i + 1

Known from arXiv 2603.01914: gates, threshold, update, aligned K/V, bottom-k cost and its two stages, weight 0.1, share
0.1; and that one MLP for all passes (`shared_gate`), or the cost on all gates (`bottom_share: 1`), makes all tokens
halt or none.  `router: linear` and `router: none` (s is 1, nobody halts: `ponderlm`) are further controls.  This
project's choices (the paper's code is not public): the readout of a halted token is its last active state; the cost
acts on gate logits clamped at -12 (`cost_on: probability` acts on s); the bottom share is taken per sequence, so that
no layout and no batch size matters; the gate MLP is ReLU, its last weight starts at 0 and its bias at +2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.config.declare import declare
from megaponder.decoding.gates import router
from megaponder.errors import ConfigError
from megaponder.ponder.base import ExitTools, Pass, Shape, pass_count, register, token_count
from megaponder.ponder.budget import Budgeted
from megaponder.ponder.halting import at_least, fraction, one_of, ordered, ramp, router32, smallest, starts_at
from megaponder.ponder.methods.aligned.training import AlignedHalting

CLAMP = -12.0
"""Gate logits below this (s about 6e-6, far below any threshold) are not pushed down further."""


@register
class AdaPonderLM(Budgeted, AlignedHalting):
    """Token-wise adaptive depth by one gate per pass."""

    name = "adaponderlm"
    summary = "ponderlm with a gate after every pass; halted tokens keep state, keys and values"

    @dataclass
    class Options:
        steps: int = pass_count(3)
        """S: pondering steps; the model runs at most S + 1 passes."""
        target: float = declare(0.9, earlier=0.0)
        """Share of the S + 1 passes that a token may spend in the mean, held by a threshold that follows it; 0: the
        paper's gates and cost, which hold no budget."""
        explore: float = 0.1
        """With a target: share of training's decisions that are drawn at random, so that scores and passes learn from
        all tokens."""
        threshold: float = declare(1e-4, unless="target")
        """tau: a token goes on while its gate is at least this (without a target)."""
        topk: int = token_count(0)
        """Tokens in the mixture; 0 means the whole vocabulary."""
        cost_weight: float = 0.1
        """Weight of the ponder cost in the loss; with a target, of the scores' error."""
        bottom_share: float = declare(0.1, unless="target")
        """Final share k_s of gates, the smallest ones, that the cost pushes down: roughly the share of passes saved
        (without a target)."""
        ramp_start: int = 0
        """Step up to which all tokens run all passes of the window; without a target, at which k_s leaves 0."""
        ramp_end: int = 0
        """Step from which on the target is met, or k_s is bottom_share."""
        cost_on: str = declare("logit", unless="target")
        """What the cost averages: gate logits, or probability (without a target)."""
        gate_width: int = 4
        """Inner size of the gate MLPs, in multiples of the hidden size."""
        router: str = declare("mlp", unless="target")
        """What the gates are, without a target: mlp (two layers), linear, or none (s is 1)."""
        shared_gate: bool = declare(False, unless="target")
        """One gate for all passes, without a target."""
        gentle_start: bool = False
        """Multiply what is fed back by a learned number that starts at 0: a trained vanilla model keeps its loss."""

        def __post_init__(self) -> None:
            for name in ("steps", "gate_width"):
                at_least(self, name, 1)
            for name in ("topk", "cost_weight"):
                at_least(self, name, 0)
            for name in ("threshold", "bottom_share", "explore"):
                fraction(self, name)
            ordered(self, "ramp_start", "ramp_end")
            one_of(self, "cost_on", ("logit", "probability"))
            one_of(self, "router", ("mlp", "linear", "none"))
            for name, plain in (("router", "mlp"), ("shared_gate", False)):
                if self.target and getattr(self, name) != plain:
                    rule = "with ponder.options.target the scores of the budget decide"
                    raise ConfigError(f"ponder.options.{name}", getattr(self, name), rule, f"use {plain}")

    def __init__(self, options: Any, shape: Shape):
        super().__init__(options, shape)
        self.open_window(options.steps + 1, "passes")

    def exit_modules(self) -> dict[str, nn.Module]:
        own = super().exit_modules()
        if self.window is not None:
            return own | {"budget": self.gates()}
        o = self.options
        if o.router == "none":
            return own
        count = 1 if o.shared_gate else o.steps
        made = [starts_at(router(o.router, self.shape.hidden_size, o.gate_width), 2.0) for _ in range(count)]
        return own | {"gates": nn.ModuleList(made)}

    def decide(
        self, p: Pass, state: Tensor, active: Tensor, carry: dict[str, Tensor], tools: ExitTools
    ) -> tuple[Tensor | None, Tensor]:
        if self.window is not None:
            return None, self._by_budget(p, state, active, carry, tools)
        if self.options.router == "none":
            return None, active
        gate = tools.modules["gates"][0 if self.options.shared_gate else p.index]  # type: ignore[index]
        logit = tools.broadcast(tools.on(active, lambda h: router32(gate, h), state)[..., 0])
        carry[f"logit{p.index}"], carry[f"asked{p.index}"] = logit, active & (tools.valid_sb > 0)
        s = logit.sigmoid()
        return s, s >= self.options.threshold

    def _by_budget(self, p: Pass, state: Tensor, active: Tensor, carry: dict[str, Tensor], tools: ExitTools) -> Tensor:
        assert self.window is not None
        index = p.index + 1 - self.window.least
        if index < 0:
            return active
        self.ended(p, state, active, carry, tools)
        decisions = self.decisions(carry, tools)
        score = decisions.gates.score(index, active, state, tools)
        return decisions.decide(index, active, score, self.at_random)

    def ended(self, p: Pass, state: Tensor, active: Tensor, carry: dict[str, Tensor], tools: ExitTools) -> None:
        if self.window is not None and tools.step is not None:
            losses = tools.target_loss(state, active)
            self.decisions(carry, tools).learn(p.index + 1 - self.window.least, losses, active)

    def sums(self, carry: dict[str, Tensor], tools: ExitTools) -> dict[str, Tensor]:
        return {} if self.window is None else self.decisions(carry, tools).stats()

    def budget(self, step: int) -> float | None:
        if self.window is not None:
            return super().budget(step)
        o = self.options
        if o.router == "none":
            return None
        now = torch.tensor(float(step), dtype=torch.float64)
        return float((o.steps + 1) * (1 - o.bottom_share * ramp(now, o.ramp_start, o.ramp_end)))

    def cost(self, carry: dict[str, Tensor], tools: ExitTools) -> Tensor | None:
        if self.window is not None:
            return None if tools.step is None else self.options.cost_weight * carry["cost"]
        if self.options.router == "none":
            return None
        share = self.options.bottom_share * ramp(tools.step, self.options.ramp_start, self.options.ramp_end)
        logits = torch.stack([carry[f"logit{i}"] for i in range(self.options.steps)], dim=0)
        asked = torch.stack([carry[f"asked{i}"] for i in range(self.options.steps)], dim=0)
        values = logits.clamp(min=CLAMP) if self.options.cost_on == "logit" else logits.sigmoid()
        # [passes, n, b] of whole sequences: the selection is the same on every rank; each takes its own tokens
        everyone = torch.stack([tools.gather(x) for x in values])
        mask = torch.stack([tools.gather(x.float()) > 0.5 for x in asked])
        selected, count = smallest(everyone, mask, share, tools.starts_nb)
        own = torch.stack([tools.scatter(x.float()) for x in selected])
        weight = tools.total(tools.valid_sb) / (count[None] if count.dim() == 1 else tools.scatter(count)).clamp(min=1)
        return self.options.cost_weight * ((values * own).sum(0) * weight).sum()

    def gate_values(self, carry: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        if self.window is not None or self.options.router == "none":
            return []
        return [(carry[f"logit{i}"].sigmoid(), carry[f"asked{i}"]) for i in range(self.options.steps)]

    def scores(self, carry: dict[str, Tensor]) -> dict[int, Tensor]:
        if self.window is not None:
            return {self.window.least + i: carry[f"score{i}"] for i in range(self.window.gates)}
        return {i + 1: carry[f"logit{i}"] for i in range(self.options.steps)}

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        h = self.shape.hidden_size
        kinds = {"none": 0.0, "linear": 2.0 * h, "mlp": 2.0 * self.options.gate_width * h**2}
        gate = kinds[self.options.router]
        if p.last or (self.window is not None and p.index + 1 < self.window.least):
            gate = 0.0
        return super().extra_flops(p, vocab_size) + gate

    def training_flops(self, p: Pass, vocab_size: int) -> float:
        if self.window is None or p.index + 1 < self.window.least:
            return 0.0
        return 2.0 * vocab_size * self.shape.hidden_size  # what a pass brought, without a gradient
