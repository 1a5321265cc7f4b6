"""Decoding with a fixed number of passes for each position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaponder.ponder.methods.aligned.decoding import AlignedDecoding


class PrunedPonderLM(AlignedDecoding):
    """Baseline: floor(depth) passes for each position or one more, at random or evenly spaced, `depth` on average."""

    name = "pruned_ponderlm"
    defaults = {"steps": 3, "depth": 3.7, "by": "random", "seed": 0, "topk": 0}

    def decide(self, model: Any, index: int | Tensor, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        base, extra, t = int(self.options["depth"]), self.options["depth"] % 1, positions.long()
        if self.options["by"] == "random":
            x = (t + 1) * 0x9E3779B1 + (self.options["seed"] + 1) * 0x85EBCA6B
            for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
                x = ((x ^ ((x & 0xFFFFFFFF) >> shift)) * factor) & 0xFFFFFFFF
            chosen = (x & 0xFFFFFF).double() / 2**24 < extra
        else:
            chosen = torch.floor((t + 1).double() * extra) > torch.floor(t.double() * extra)
        return torch.ones_like(t, dtype=h.dtype), base + chosen.long() > index + 1
