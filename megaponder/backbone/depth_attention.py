"""Depth-Attention: the values of a layer are mixed with those of earlier layers at the same token, before attention.

    s_j = scale <q, k_j>     j: earlier layers, and the layer itself; q: mean of the query heads of a key/value head
    a   = softmax_j(s)       in FP32
    u   = sum_j a_j w_j      w_j: what layer j made of its values; of the layer itself, v

Attention then reads (k, u), and so does a cache: it is no larger.  There are no parameters.  Every token mixes by
itself, so nothing here depends on order, masks or padding; as all layers rotate alike, RoPE changes no score.

Nothing is stacked: the backward reads the same tensors once more, which attention and earlier layers hold anyway, and
makes the weights anew.  On GPUs it is one kernel each way (`backbone.depth_attention_kernel`), unless heads weigh by
themselves.

Shapes: s rows, b micro-batch, h heads, g key/value heads of this rank, r = h / g, d head size, j earlier layers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megaponder.decoding.depth_sources import DepthAttention

Entry = tuple[Tensor, Tensor]
"""Keys and values [s, b, g, d] of an earlier layer."""


def _wide(x: Tensor) -> Tensor:
    """In FP32, unless x is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _probabilities(q: Tensor, keys: Sequence[Tensor], mean_query: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(queries [s, b, g, 1 or r, d], probabilities [j, s, b, g, 1 or r])."""
    q = _wide(q).unflatten(2, (keys[0].shape[2], -1))
    if mean_query:
        q = q.mean(3, keepdim=True)
    scores = torch.stack([(q * _wide(k)[:, :, :, None]).sum(-1) for k in keys])
    return q, (scale * scores).softmax(0)


class _Mix(torch.autograd.Function):
    """sum_j a_j w_j over keys and values [s, b, g, d]; keys come first."""

    @staticmethod
    def forward(ctx: Any, mean_query: bool, scale: float, q: Tensor, *keys_values: Tensor) -> Tensor:
        keys, values = keys_values[: len(keys_values) // 2], keys_values[len(keys_values) // 2 :]
        share = _probabilities(q, keys, mean_query, scale)[1].mean(-1)
        out = torch.zeros_like(_wide(values[0]))
        for a, w in zip(share, values, strict=True):
            out += a[..., None] * w
        ctx.mean_query, ctx.scale = mean_query, scale
        ctx.save_for_backward(q, *keys_values)
        return out.to(values[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, *keys_values = ctx.saved_tensors
        keys, values = keys_values[: len(keys_values) // 2], keys_values[len(keys_values) // 2 :]
        queries, p = _probabilities(q, keys, ctx.mean_query, ctx.scale)
        wide = _wide(grad)
        share = p.mean(-1)
        to_p = torch.stack([(wide * w).sum(-1) for w in values])[..., None] / p.shape[-1]
        to_scores = ctx.scale * p * (to_p - (p * to_p).sum(0))
        to_q, to_keys, to_values = torch.zeros_like(queries), [], []
        for t, a, k in zip(to_scores, share, keys, strict=True):
            to_q += t[..., None] * _wide(k)[:, :, :, None]
            to_keys.append((t[..., None] * queries).sum(3).to(k.dtype))
            to_values.append((a[..., None] * wide).to(k.dtype))
        if ctx.mean_query:
            r = q.shape[2] // keys[0].shape[2]
            to_q = (to_q / r).expand(-1, -1, -1, r, -1)
        return None, None, to_q.flatten(2, 3).to(q.dtype), *to_keys, *to_values


@functools.cache
def kernel() -> ModuleType | None:
    """The fused form; None where there is no Triton."""
    try:
        from megaponder.backbone import depth_attention_kernel
    except ImportError:
        return None
    return depth_attention_kernel


def mix(
    depth: DepthAttention, q: Tensor, k: Tensor, v: Tensor, sources: Sequence[Tensor], fused: bool | None = None
) -> tuple[Tensor, ...]:
    """The values u [s, b, g, d] that attention reads, then the sources in the form that later layers must read.

    q [s, b, h, d] and k, v [s, b, g, d] are the layer's own; `sources` are keys and values of earlier layers, in turn.
    `fused`: by the kernel; None: where it can.
    """
    if not sources:
        return (v,)
    scale, competes, triton = depth.scale or q.shape[-1] ** -0.5, depth.own == "softmax", kernel()
    if fused is None:
        fused = q.is_cuda and depth.query == "mean_query" and triton is not None
    if fused:
        assert triton is not None and depth.query == "mean_query"
        mixed, *sources = triton.mix(scale, competes, *(x.contiguous() for x in (q, k, v)), sources)
    else:
        keys, values = [*sources[0::2], *([k] if competes else [])], [*sources[1::2], *([v] if competes else [])]
        mixed = _Mix.apply(depth.query == "mean_query", scale, q, *keys, *values)
    return mixed if competes else v + mixed, *sources
