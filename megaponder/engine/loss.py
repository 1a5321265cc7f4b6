"""Cross entropy over a vocabulary that is split into rows of the tensor group; logits stay in the model's precision.

    loss = lse - logit of the target,   lse = log sum_v exp(logit_v),   d loss / d logit = softmax - onehot

A z-loss z * lse^2 (PaLM, arXiv 2204.02311) keeps the normaliser near 1.  It is in each token's gradient and not in
its loss: where a method weighs the losses of several passes, each z-loss has the weight of its loss, and does
not move the weights.

All arithmetic is FP32; stored values and gradients have the dtype of the logits.  There are three reductions of [n, b]
over the group, and no logit leaves its rank.

Shapes: n tokens, b micro-batch, V' padded vocabulary rows of this rank, of which the first `valid` are real.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaponder.backbone.fused import fused

MINUS_INF = float("-inf")


def all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    """In place over the group; nothing to do in a group of one."""
    if group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


def masked(x: Tensor, valid: int, fill: float = MINUS_INF) -> Tensor:
    """x [..., V'] with `fill` at padding rows of the table."""
    if valid >= x.shape[-1]:
        return x
    return torch.where(torch.arange(x.shape[-1], device=x.device) < valid, x, fill)


@fused
def _peak(logits: Tensor, valid: int) -> Tensor:
    return masked(logits.float(), valid, MINUS_INF).amax(-1)


@fused
def _total(logits: Tensor, peak: Tensor, valid: int) -> Tensor:
    return masked((logits.float() - peak[..., None]).exp(), valid, 0.0).sum(-1)


@fused
def probabilities(logits: Tensor, lse: Tensor, valid: int) -> Tensor:
    """exp(logits - lse) in the logits' format, 0 at padding rows."""
    return masked((logits.float() - lse[..., None]).exp(), valid, 0.0).to(logits.dtype)


@fused
def _gradient(logits: Tensor, lse: Tensor, target: Tensor, grad: Tensor, valid: int, z: float) -> Tensor:
    p = masked((logits.float() - lse[..., None]).exp(), valid, 0.0)
    if z:
        p = p * (1 + 2 * z * lse)[..., None]
    hit = torch.arange(logits.shape[-1], device=logits.device) == target[..., None]
    return ((p - hit.float()) * grad[..., None]).to(logits.dtype)


def log_sum_exp(logits: Tensor, valid: int, group: dist.ProcessGroup) -> Tensor:
    """FP32 log of the sum of exp over the whole true vocabulary [n, b]; no gradient of its own."""
    peak = all_reduce(_peak(logits, valid), dist.ReduceOp.MAX, group)
    total = all_reduce(_total(logits, peak, valid), dist.ReduceOp.SUM, group)
    return peak + total.log()


@fused
def _surprise(logits: Tensor, lse: Tensor, valid: int) -> Tensor:
    less = lse[..., None] - logits.float()
    return masked((-less).exp() * less, valid, 0.0).sum(-1)


@torch.no_grad()
def entropy(logits: Tensor, lse: Tensor, valid: int, group: dist.ProcessGroup) -> Tensor:
    """FP32 entropy of each token's distribution over the whole true vocabulary [n, b], without gradient."""
    return all_reduce(_surprise(logits, lse, valid), dist.ReduceOp.SUM, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, valid: int, group: dist.ProcessGroup, z: float
    ) -> tuple[Tensor, Tensor]:
        lse = log_sum_exp(logits, valid, group)
        target = labels - group.rank() * logits.shape[-1]
        here = (target >= 0) & (target < logits.shape[-1])
        found = logits.gather(-1, target.where(here, torch.zeros_like(target))[..., None])[..., 0].float()
        found = all_reduce(found.where(here, torch.zeros_like(found)), dist.ReduceOp.SUM, group)
        ctx.save_for_backward(logits, lse, target)
        ctx.valid, ctx.z = valid, z
        ctx.mark_non_differentiable(lse)
        return lse - found, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, lse, target = ctx.saved_tensors
        return _gradient(logits, lse, target, grad.contiguous(), ctx.valid, ctx.z), None, None, None, None


def cross_entropy(
    logits: Tensor, labels_nb: Tensor, valid: int, group: dist.ProcessGroup, z: float = 0.0
) -> tuple[Tensor, Tensor]:
    """FP32 loss of every token, and its lse without gradient, [n, b] each, from this rank's logits [n, b, V'].

    `z`: the coefficient of the z-loss in the gradient.
    """
    out: tuple[Tensor, Tensor] = _CrossEntropy.apply(logits, labels_nb, valid, group, z)
    return out
