"""Decoding of Ouro."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaponder.decoding.backbone import linear
from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Run


class Ouro(DecodingMethod):
    """The stack runs `loops` times, each with keys and values of its own. With `exit_threshold` below 1 a token is read
    out after the first loop at which the sum of its exit distribution reaches the threshold; the later loops still run,
    since later tokens need their keys and values."""

    name = "ouro"
    defaults = {"loops": 4, "exit_threshold": 1.0}
    training_only = ("stage", "entropy_weight", "judges", "gain_scale", "gain_from")

    def modules(self) -> dict[str, nn.Module]:
        return {"gate": nn.Linear(self.config.hidden_size, 1)}

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net, q = model.model, self.options["exit_threshold"]
        h = read = net.embed(net.words(ids), run.positions)
        stopped = torch.zeros_like(run.positions, dtype=torch.bool)
        survival = torch.zeros(run.positions.shape, device=ids.device)
        for index in range(self.options["loops"]):
            h = net.norm(net.stack(h, index, run.view(index)))
            read = torch.where(stopped[..., None], read, h)
            if q < 1:  # the sum reaches 1.0 by rounding: a threshold of 1 means never
                survival = survival + F.logsigmoid(-linear(model.method["gate"], h)[..., 0])
                stopped = stopped | (-torch.expm1(survival) >= q)
        return read
