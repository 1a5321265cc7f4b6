"""One softmax over several sets of keys, as one fused causal call per set, merged by log-sum-exp.

    o = sum_j w_j o_j,   w_j = exp(lse_j - lse),   lse = log sum_j exp(lse_j)

In the backward, every fused kernel gets the merged o and lse, which turns its local probabilities into the global ones
(as in ring attention), so each set's call yields exactly its share of the gradients.  No [n, K n] mask is built, and
the upper half of each square is not computed.

Shapes: q, k_j, v_j [b, h, n, d].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def fused_is_possible(q: Tensor) -> bool:
    """Whether a kernel that returns log-sum-exp exists for these tensors."""
    if q.is_cuda:
        return q.dtype in (torch.float16, torch.bfloat16)
    return q.dtype in (torch.float32, torch.float64, torch.bfloat16)


def all_heads(x: Tensor, heads: int) -> Tensor:
    """Grouped-query attention: each key/value head of x [..., g, d] once for every query head that reads it."""
    repeat = heads // x.shape[-2]
    return x if repeat == 1 else x.repeat_interleave(repeat, dim=-2)


def forward_call(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> tuple[Any, ...]:
    """(output, log-sum-exp, further inputs of the backward kernel)."""
    if q.is_cuda:
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return out, lse, cum_q, cum_k, max_q, max_k, seed, offset
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def backward_call(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: Any, scale: float,
    causal: bool = True,
) -> Any:  # fmt: skip
    """Gradients of q, k and v, of which the call's share in the merged output is known by `lse`."""
    if q.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = rest
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
        )
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def combined(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one softmax over the keys of all calls, in the format of the latter."""
    lse = torch.stack(lses).logsumexp(0)
    total = sum(o.to(lse.dtype) * (x - lse).exp()[..., None] for o, x in zip(outs, lses, strict=True))
    assert isinstance(total, Tensor)
    return total, lse


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, q: Tensor, *keys_values: Tensor) -> Tensor:
        sets = len(keys_values) // 2
        outs, lses, rests = [], [], []
        for k, v in zip(keys_values[:sets], keys_values[sets:], strict=True):
            out, lse, *rest = forward_call(q, k, v, scale)
            outs.append(out)
            lses.append(lse)
            rests.append(rest)
        total, lse = combined(outs, lses)
        total = total.to(q.dtype)
        ctx.save_for_backward(q, total, lse, *keys_values)
        ctx.scale, ctx.rests = scale, rests
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *keys_values = ctx.saved_tensors
        sets = len(keys_values) // 2
        dq, dk, dv = torch.zeros_like(q), [], []
        for k, v, rest in zip(keys_values[:sets], keys_values[sets:], ctx.rests, strict=True):
            part = backward_call(grad.contiguous(), q, k, v, out, lse, rest, ctx.scale)
            dq = dq + part[0]
            dk.append(part[1])
            dv.append(part[2])
        return (None, dq, *dk, *dv)


def merged_causal(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """softmax over all sets, row i seeing rows <= i of each: [b, h, n, d]."""
    out: Tensor = _Merged.apply(scale, q, *keys, *values)
    return out
