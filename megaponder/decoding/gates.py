"""Who goes on: routers, and the open decisions of a budget's window, whose scores meet one threshold."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaponder.decoding.wide import linear
from megaponder.decoding.window import scales


def router(kind: str, hidden: int, width: int) -> nn.Linear | nn.Sequential:
    """From a state [H] to one logit: `linear`, or `mlp` with `width` times H inside."""
    if kind == "linear":
        return nn.Linear(hidden, 1)
    return nn.Sequential(nn.Linear(hidden, width * hidden), nn.ReLU(), nn.Linear(width * hidden, 1))


def logit(module: nn.Linear | nn.Sequential, h: Tensor) -> Tensor:
    """A router's [b, n] of states [b, n, H]."""
    if isinstance(module, nn.Linear):
        return linear(module, h)[..., 0]
    first, _, last = module
    return linear(last, F.relu(linear(first, h)))[..., 0]


class Threshold(nn.Module):
    """`state` begins with the threshold; the rest is what training follows it by."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.zeros(7), requires_grad=False)

    def reached(self, score: Tensor) -> Tensor:
        """Whether tokens go on, bool, by their scores."""
        return score >= self.state[0].to(score.dtype)


class Gates(Threshold):
    """One MLP for each open decision, and the threshold."""

    def __init__(self, hidden: int, width: int, count: int):
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, width * hidden), nn.ReLU(), nn.Linear(width * hidden, 1))
            for _ in range(count)
        )

    def score(self, index: int, h: Tensor) -> Tensor:
        """[b, n] of states [b, n, H]."""
        first: nn.Linear
        last: nn.Linear
        first, _, last = self.mlps[index]  # type: ignore[misc]
        into, out = scales(h.shape[-1], last.in_features)
        return (linear(last, F.relu(linear(first, h) * into)) * out)[..., 0]

    def go_on(self, index: int, h: Tensor) -> Tensor:
        """Whether tokens go on at decision `index`: bool [b, n] of states [b, n, H]."""
        return self.reached(self.score(index, h))
