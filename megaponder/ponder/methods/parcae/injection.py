"""What both forms of Parcae have: the injection, and the values of layers.  Without transformers, for training."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaponder.decoding.wide import wide

EPSILON = 1e-5
GATED = 32
"""Channels of a layer's input that its values' gate reads."""
KEPT = math.sqrt(1 / 5)
"""The share of a state that the injection keeps at first."""


class Injection(nn.Module):
    """a s + dt B N(e): each channel of the state decays, so that no recurrence can amplify it without bound."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(width))
        self.A_log = nn.Parameter(torch.zeros(width))
        self.dt_bias = nn.Parameter(torch.full((width,), math.log(math.expm1(-math.log(KEPT)))))
        self.B = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.B.weight)

    def prepared(self, embedded: Tensor) -> Tensor:
        """B N(e), the same in every recurrence."""
        x = wide(embedded)
        x = x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * wide(self.norm)
        out: Tensor = self.B(x.to(embedded.dtype))
        return out

    def forward(self, state: Tensor, prepared: Tensor) -> Tensor:
        dt = F.softplus(wide(self.dt_bias))
        keep = torch.exp(-dt * torch.exp(wide(self.A_log)))
        return (keep * wide(state) + dt * wide(prepared)).to(prepared.dtype)


class Values(nn.Module):
    """What a layer adds to its values: a row of a table for each token, and of each head as much as a gate says."""

    def __init__(self, vocabulary: int, heads: int, size: int):
        super().__init__()
        self.size = size
        self.table = nn.Parameter(torch.randn(vocabulary, heads * size))
        self.gate = nn.Parameter(torch.zeros(heads, GATED))

    def forward(self, ids: Tensor, inputs: Tensor, heads: slice) -> Tensor:
        """[..., heads, size] of tokens `ids` [...] and the first channels [..., GATED] of the layer's input."""
        columns = slice(heads.start * self.size, heads.stop * self.size)
        rows = F.embedding(ids, self.table[:, columns]).unflatten(-1, (-1, self.size))
        gate = 2 * torch.sigmoid(F.linear(wide(inputs), wide(self.gate[heads])))
        out: Tensor = (gate[..., None] * wide(rows)).to(inputs.dtype)
        return out


def has_values(layer: int, layers: int) -> bool:
    """Every other layer, the last included."""
    return (layers - 1 - layer) % 2 == 0
