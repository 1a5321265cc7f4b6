"""The gate of a gentle start: one learned number that multiplies what a pass feeds back."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FeedbackGate(nn.Module):
    """g x with g = 0 at the start: the model then computes what the vanilla one does, and g has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)
