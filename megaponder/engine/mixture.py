"""softmax(h Wo^T) (c We) with both tables split by vocabulary rows: no probability leaves its rank.

Per rank: local logits; all-reduce of the row maximum and of the row sum; local probabilities times local table rows;
one reduction of [rows, b, H].  Backward likewise needs one all-reduce of [rows, b].  Source: spec of PonderLM v1, 4.1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megaponder.backbone.fused import fused
from megaponder.engine.loss import MINUS_INF, all_reduce, log_sum_exp, masked, probabilities


def _keep_topk(logits: Tensor, topk: int, group: dist.ProcessGroup) -> Tensor:
    """Logits below the globally k-th largest at -inf; entries equal to it stay, so that the order of ranks does not
    matter."""
    best = logits.topk(min(topk, logits.shape[-1]), dim=-1).values
    if group.size() > 1:
        parts = [torch.empty_like(best) for _ in range(group.size())]
        dist.all_gather(parts, best.contiguous(), group=group)
        best = torch.cat(parts, dim=-1)
    threshold = best.topk(min(topk, best.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, MINUS_INF)


@fused
def _expected(p: Tensor, dp: Tensor) -> Tensor:
    return (p.float() * dp.float()).sum(-1)


@fused
def _softmax_gradient(p: Tensor, dp: Tensor, mean: Tensor) -> Tensor:
    return ((dp.float() - mean[..., None]) * p.float()).to(p.dtype)


class _Mixture(torch.autograd.Function):
    """This rank's part of the mixture and of its gradients; the caller reduces over the tensor group."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, head: Tensor, table: Tensor, scale: float, topk: int, valid: int, group: dist.ProcessGroup
    ) -> Tensor:
        logits = h @ head.t()
        if topk:
            logits = _keep_topk(masked(logits, valid), topk, group)
        p = probabilities(logits, log_sum_exp(logits, valid, group), valid)
        ctx.save_for_backward(h, head, table, p)
        ctx.scale, ctx.group = scale, group
        return (p @ table) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, head, table, p = ctx.saved_tensors
        grad = grad * ctx.scale
        dp = grad @ table.t()
        mean = all_reduce(_expected(p, dp), dist.ReduceOp.SUM, ctx.group)
        dlogits = _softmax_gradient(p, dp, mean)
        flat = lambda t: t.reshape(-1, t.shape[-1])  # noqa: E731
        return dlogits @ head, flat(dlogits).t() @ flat(h), flat(p).t() @ flat(grad), None, None, None, None


def vocabulary_mixture(
    h_sbh: Tensor,
    head: Tensor,
    table: Tensor,
    *,
    scale: float,
    topk: int,
    vocab_size: int,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
) -> Tensor:
    """Expected (scaled) embedding of the next token: [s, b, H] -> [s, b, H].

    `head` and `table` are this rank's rows [V_padded/tp, H]; `topk` 0 means the whole true vocabulary.
    """
    valid = vocab_size - group.rank() * head.shape[0]
    if sequence_parallel:
        h_sbh = gather_from_sequence_parallel_region(h_sbh, tensor_parallel_output_grad=True, group=group)
    else:
        h_sbh = copy_to_tensor_model_parallel_region(h_sbh, group=group)
    part = _Mixture.apply(h_sbh, head, table, scale, topk, valid, group)
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(part, group=group)
    return reduce_from_tensor_model_parallel_region(part, group=group)
