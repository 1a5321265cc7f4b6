"""Decoding of AdaPonderLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.gates import Gates, logit, router
from megaponder.decoding.steps import at_pass, by_pass
from megaponder.ponder.methods.aligned.decoding import AlignedDecoding


class AdaPonderLM(AlignedDecoding):
    """PonderLM with a gate s after every pass: a token continues while s >= threshold, and adds s times its mixture.

    With a target: every token runs the window's least passes, then goes on while its score is at least the threshold
    that training left; the mixture is added whole.
    """

    name = "adaponderlm"
    defaults = {
        "steps": 3,
        "target": 0.0,
        "threshold": 1e-4,
        "topk": 0,
        "gate_width": 4,
        "router": "mlp",
        "shared_gate": False,
        "gentle_start": False,
    }
    training_only = ("explore", "cost_weight", "bottom_share", "ramp_start", "ramp_end", "cost_on")

    def modules(self) -> dict[str, nn.Module]:
        width, o = self.config.hidden_size, self.options
        own = super().modules()
        if self.window is not None:
            return own | {"budget": Gates(width, o["gate_width"], self.window.gates)}
        if o["router"] == "none":
            return own
        count = 1 if o["shared_gate"] else o["steps"]
        return own | {"gates": nn.ModuleList(router(o["router"], width, o["gate_width"]) for _ in range(count))}

    def decide(self, model: Any, index: int | Tensor, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.ones_like(h[..., 0])
        if self.window is not None:
            return whole, by_pass(index, self.window.least, self.window.most, model.method["budget"].go_on, h)
        if self.options["router"] == "none":
            return whole, whole > 0
        gates, shared = model.method["gates"], self.options["shared_gate"]
        s = at_pass(index, self.options["steps"], lambda i, rows: logit(gates[0 if shared else i], rows).sigmoid(), h)
        return s, s >= self.options["threshold"]
