"""Mixture of experts in plain PyTorch: the same choice as in training, one expert after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        routed = options.router_count * options.experts  # one router after the other
        self.gate = nn.Linear(hidden, routed, bias=False)
        self.experts = nn.ModuleList([mlp(width) for _ in range(options.experts)])
        if options.shared_ffn:
            self.shared_expert = mlp(options.shared_ffn)
        if options.bias_rate:
            self.expert_bias = nn.Parameter(torch.zeros(routed), requires_grad=False)

    def chosen(self, rows: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts [rows, k] of each row; rows are at these steps in turn."""
        o, own = self.options, self.options.routers_of(steps)
        weights = self.gate.weight.unflatten(0, (-1, o.experts))
        parts = rows.unflatten(0, (-1, len(own))).unbind(1)
        logits = torch.stack([F.linear(wide(x), wide(weights[i])) for x, i in zip(parts, own, strict=True)], dim=1)
        scores = logits.softmax(-1) if o.score == "softmax" else logits.sigmoid()
        by = scores
        if o.bias_rate:
            biases = wide(self.expert_bias).view(-1, o.experts)
            by = scores + torch.stack([biases[i] for i in own])
        scores, by = scores.flatten(0, 1), by.flatten(0, 1)
        best = by.topk(o.top_k, dim=-1).indices
        weights = scores.gather(-1, best)
        if o.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * o.scale, best

    def forward(self, x: Tensor, steps: Sequence[int]) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, best = self.chosen(rows, steps)
        out = torch.zeros_like(rows)
        for number in best.unique().tolist():
            row, place = torch.where(best == number)
            made = self.experts[number](rows[row])
            out = out.index_add(0, row, (made * weights[row, place, None]).to(out.dtype))
        if self.options.shared_ffn:
            out = out + self.shared_expert(rows)
        return out.view_as(x)
