"""Decoding with early exit by confidence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.backbone import wide
from megaponder.decoding.gates import Threshold
from megaponder.decoding.steps import flag
from megaponder.ponder.methods.aligned.decoding import AlignedDecoding


class ConfidentPonderLM(AlignedDecoding):
    """Baseline: a token exits once its most likely next token reaches the threshold (1: never).

    With a target: every token runs the window's least passes, then exits once that probability is above 1 minus the
    threshold that training left.
    """

    name = "confident_ponderlm"
    defaults = {"steps": 3, "threshold": 1.0, "topk": 0, "target": 0.0, "gentle_start": False}
    training_only = ("explore", "ramp_start", "ramp_end")

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | ({} if self.window is None else {"budget": Threshold()})

    def decide(self, model: Any, index: int | Tensor, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.ones_like(h[..., 0])
        if self.window is None and self.options["threshold"] >= 1:
            return whole, whole > 0
        if self.window is not None and isinstance(index, int) and index + 1 < self.window.least:
            return whole, whole > 0  # without the head
        best = wide(model.lm_head(h)).softmax(-1).amax(-1)
        if self.window is None:
            return whole, best < self.options["threshold"]
        early = flag(index + 1 < self.window.least, h)
        return whole, early | model.method["budget"].reached(1 - best)
