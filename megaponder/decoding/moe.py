"""Mixture of experts in plain PyTorch: the same choice as in training, one expert after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaponder.decoding.moe_options import Experts
from megaponder.decoding.wide import wide


class Mixture(nn.Module):
    """Experts, of which every row takes some, and the shared expert; `moe_options` has the formula.

    `mlp`: makes an MLP of a width.
    """

    def __init__(self, options: Experts, hidden: int, width: int, mlp: Callable[[int], nn.Module]):
        super().__init__()
        self.options = options
        self.gate = nn.Linear(hidden, options.experts, bias=False)
        self.experts = nn.ModuleList([mlp(width) for _ in range(options.experts)])
        if options.shared_ffn:
            self.shared_expert = mlp(options.shared_ffn)
        if options.bias_rate:
            self.expert_bias = nn.Parameter(torch.zeros(options.experts), requires_grad=False)

    def chosen(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts [rows, k] of each row."""
        o, logits = self.options, F.linear(wide(rows), wide(self.gate.weight))
        scores = logits.softmax(-1) if o.score == "softmax" else logits.sigmoid()
        by = scores + wide(self.expert_bias) if o.bias_rate else scores
        best = by.topk(o.top_k, dim=-1).indices
        weights = scores.gather(-1, best)
        if o.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * o.scale, best

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, best = self.chosen(rows)
        out = torch.zeros_like(rows)
        for number in best.unique().tolist():
            row, place = torch.where(best == number)
            made = self.experts[number](rows[row])
            out = out.index_add(0, row, (made * weights[row, place, None]).to(out.dtype))
        if self.options.shared_ffn:
            out = out + self.shared_expert(rows)
        return out.view_as(x)
