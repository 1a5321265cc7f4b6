"""The open decisions of a budget's window: scores of what one more pass brings, against one threshold."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaponder.decoding.backbone import linear
from megaponder.decoding.window import scales


class Gates(nn.Module):
    """One MLP for each open decision; `state` begins with the threshold (the rest is what training follows it by)."""

    def __init__(self, hidden: int, width: int, count: int):
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, width * hidden), nn.ReLU(), nn.Linear(width * hidden, 1))
            for _ in range(count)
        )
        self.state = nn.Parameter(torch.zeros(7), requires_grad=False)

    def score(self, index: int, h: Tensor) -> Tensor:
        """[b, n] of states [b, n, H]."""
        first: nn.Linear
        last: nn.Linear
        first, _, last = self.mlps[index]  # type: ignore[misc]
        into, out = scales(h.shape[-1], last.in_features)
        return (linear(last, F.relu(linear(first, h) * into)) * out)[..., 0]

    def go_on(self, index: int, h: Tensor) -> Tensor:
        """Whether tokens go on at decision `index`: bool [b, n] of states [b, n, H]."""
        score = self.score(index, h)
        return score >= self.state[0].to(score.dtype)
