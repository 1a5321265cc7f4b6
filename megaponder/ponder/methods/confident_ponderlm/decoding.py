"""Decoding with early exit by confidence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaponder.decoding.passes import Run
from megaponder.ponder.methods.aligned.decoding import AlignedDecoding


class ConfidentPonderLM(AlignedDecoding):
    """Baseline: a token exits once its most likely next token reaches the threshold (1: never)."""

    name = "confident_ponderlm"
    defaults = {"steps": 3, "threshold": 1.0, "topk": 0}

    def decide(self, model: Any, index: int, h: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        best = model.lm_head(h).float().softmax(-1).amax(-1)
        return torch.ones_like(best, dtype=h.dtype), (best < self.options["threshold"]) | (
            self.options["threshold"] >= 1
        )
