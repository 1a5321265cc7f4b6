"""AdaPonderLM: PonderLM whose tokens stop pondering when their gate says so.

    h^i = N(Stack(E^i)), of a halted token the last active one
    s^i = sigmoid(MLP_i(h^i));   m^0 = 1,  m^{i+1} = m^i [s^i >= tau]
    E^{i+1} = E^i + m^{i+1} s^i softmax(h^i Wo^T) (c We)
    keys and values of a halted token: those of the pass in which it halted
    loss = CE + weight * mean of the smallest share k_s of the gates;  k_s ramps from 0 to bottom_share

Known from arXiv 2603.01914: gates, threshold, update, aligned K/V, bottom-k cost and its two stages, weight 0.1, share
0.1.  This project's choices (the paper's code is not public): the readout of a halted token is its last active state;
the cost acts on gate logits clamped at -12 (`cost_on: probability` acts on s); the bottom share is taken per sequence,
so that no layout and no batch size matters; the gate MLP is ReLU, its last weight starts at 0 and its bias at +2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaponder.errors import ConfigError
from megaponder.ponder.base import ExitTools, Pass, pass_count, register, token_count
from megaponder.ponder.halting import at_least, fraction, linear32, ordered, ramp, smallest
from megaponder.ponder.methods.aligned.training import AlignedHalting

CLAMP = -12.0
"""Gate logits below this (s about 6e-6, far under any threshold) are not pushed further down."""


@register
class AdaPonderLM(AlignedHalting):
    """Token-wise adaptive depth by one gate per pass."""

    name = "adaponderlm"
    summary = "ponderlm with a gate after every pass; halted tokens keep state, keys and values"

    @dataclass
    class Options:
        steps: int = pass_count(3)
        """S: pondering steps; the model runs at most S + 1 passes."""
        threshold: float = 1e-4
        """tau: a token goes on while its gate is at least this."""
        topk: int = token_count(0)
        """Tokens in the mixture; 0 means the whole vocabulary."""
        cost_weight: float = 0.1
        """Weight of the ponder cost in the loss."""
        bottom_share: float = 0.1
        """Final share k_s of gates, the smallest ones, that the cost pushes down: about the share of passes saved."""
        ramp_start: int = 0
        """Step at which k_s leaves 0."""
        ramp_end: int = 0
        """Step from which on k_s is bottom_share."""
        cost_on: str = "logit"
        """What the cost averages: gate logits, or probability."""
        gate_width: int = 4
        """Inner size of the gate MLPs, in hidden sizes."""

        def __post_init__(self) -> None:
            for name in ("steps", "gate_width"):
                at_least(self, name, 1)
            for name in ("topk", "cost_weight"):
                at_least(self, name, 0)
            for name in ("threshold", "bottom_share"):
                fraction(self, name)
            ordered(self, "ramp_start", "ramp_end")
            if self.cost_on not in ("logit", "probability"):
                raise ConfigError(
                    "ponder.options.cost_on", self.cost_on, "it must be logit or probability", "use logit"
                )

    def exit_modules(self) -> dict[str, nn.Module]:
        h, inner = self.shape.hidden_size, self.options.gate_width * self.shape.hidden_size
        gates = [nn.Sequential(nn.Linear(h, inner), nn.ReLU(), nn.Linear(inner, 1)) for _ in range(self.options.steps)]
        for gate in gates:
            nn.init.zeros_(gate[2].weight)  # type: ignore[arg-type]
            nn.init.constant_(gate[2].bias, 2.0)  # type: ignore[arg-type]
        return {"gates": nn.ModuleList(gates)}

    def decide(
        self, p: Pass, state: Tensor, active: Tensor, carry: dict[str, Tensor], tools: ExitTools
    ) -> tuple[Tensor, Tensor]:
        gate = tools.modules["gates"][p.index]  # type: ignore[index]
        logit = tools.on(active, lambda h: linear32(gate[2], torch.relu(linear32(gate[0], h))), state)
        logit = tools.broadcast(logit[..., 0])
        carry[f"logit{p.index}"], carry[f"asked{p.index}"] = logit, active & (tools.valid_sb > 0)
        s = logit.sigmoid()
        return s, s >= self.options.threshold

    def cost(self, carry: dict[str, Tensor], tools: ExitTools) -> Tensor | None:
        share = self.options.bottom_share * ramp(tools.step, self.options.ramp_start, self.options.ramp_end)
        logits = torch.stack([carry[f"logit{i}"] for i in range(self.options.steps)], dim=0)
        asked = torch.stack([carry[f"asked{i}"] for i in range(self.options.steps)], dim=0)
        values = logits.clamp(min=CLAMP) if self.options.cost_on == "logit" else logits.sigmoid()
        # [passes, n, b] of whole sequences: the selection is the same on every rank, each takes its own tokens of it
        everyone = torch.stack([tools.gather(x) for x in values])
        selected, count = smallest(everyone, torch.stack([tools.gather(x.float()) > 0.5 for x in asked]), share)
        own = torch.stack([tools.scatter(x.float()) for x in selected])
        tokens = tools.gather(tools.valid_sb).sum(0)
        return self.options.cost_weight * ((values * own).sum((0, 1)) * tokens / count.clamp(min=1)).sum()

    def gate_values(self, carry: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [(carry[f"logit{i}"].sigmoid(), carry[f"asked{i}"]) for i in range(self.options.steps)]

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        gate = 2.0 * self.options.gate_width * self.shape.hidden_size**2
        return super().extra_flops(p, vocab_size) + (0.0 if p.last else gate)
