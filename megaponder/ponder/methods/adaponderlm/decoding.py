"""Decoding of AdaPonderLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from megaponder.decoding.backbone import linear
from megaponder.decoding.passes import Run
from megaponder.ponder.methods.aligned.decoding import AlignedDecoding


class AdaPonderLM(AlignedDecoding):
    """PonderLM with a gate s after every pass: a token goes on while s >= threshold, and adds s times its mixture."""

    name = "adaponderlm"
    defaults = {"steps": 3, "threshold": 1e-4, "topk": 0, "gate_width": 4}
    training_only = ("cost_weight", "bottom_share", "ramp_start", "ramp_end", "cost_on")

    def modules(self) -> dict[str, nn.Module]:
        width = self.config.hidden_size
        inner = self.options["gate_width"] * width
        gates = [
            nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, 1)) for _ in range(self.options["steps"])
        ]
        return {"gates": nn.ModuleList(gates)}

    def decide(self, model: Any, index: int, h: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        first, _, last = model.method["gates"][index]
        gate = linear(last, F.relu(linear(first, h)))[..., 0].sigmoid()
        return gate, gate >= self.options["threshold"]
