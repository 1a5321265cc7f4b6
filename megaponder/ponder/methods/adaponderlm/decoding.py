"""Decoding of AdaPonderLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaponder.decoding.backbone import linear
from megaponder.decoding.gates import Gates
from megaponder.decoding.passes import Run
from megaponder.ponder.methods.aligned.decoding import AlignedDecoding


class AdaPonderLM(AlignedDecoding):
    """PonderLM with a gate s after every pass: a token continues while s >= threshold, and adds s times its mixture.

    With a target: every token runs the window's least passes, then goes on while its score is at least the threshold
    that training left; the mixture is added whole.
    """

    name = "adaponderlm"
    defaults = {"steps": 3, "target": 0.0, "threshold": 1e-4, "topk": 0, "gate_width": 4}
    training_only = ("explore", "cost_weight", "bottom_share", "ramp_start", "ramp_end", "cost_on")

    def modules(self) -> dict[str, nn.Module]:
        width = self.config.hidden_size
        if self.window is not None:
            return {"budget": Gates(width, self.options["gate_width"], self.window.gates)}
        inner = self.options["gate_width"] * width
        gates = [
            nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, 1)) for _ in range(self.options["steps"])
        ]
        return {"gates": nn.ModuleList(gates)}

    def decide(self, model: Any, index: int, h: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        if self.window is not None:
            whole = torch.ones_like(h[..., 0])
            gate = index + 1 - self.window.least
            return whole, whole > 0 if gate < 0 else model.method["budget"].go_on(gate, h)
        first, _, last = model.method["gates"][index]
        s = linear(last, F.relu(linear(first, h)))[..., 0].sigmoid()
        return s, s >= self.options["threshold"]
