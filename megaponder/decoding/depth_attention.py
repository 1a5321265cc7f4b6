"""Depth-Attention in decoding: a layer's values are mixed with those of earlier layers at the same row.

What is mixed goes where the values would go, so a cache is no larger, and cached rows are never mixed again.

Shapes: b batch, h heads, g key/value heads, r new rows, d head size, j earlier layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaponder.decoding.depth_sources import DepthAttention

Entries = list[tuple[Tensor, Tensor]]
"""Keys and values [b, g, r, d] of earlier layers."""


def mix(depth: DepthAttention, q: Tensor, k: Tensor, v: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """The values [b, g, r, d] that attention reads, of q [b, h, r, d] and the layer's own k and v.

    `sources`: keys and values of earlier layers in turn.
    """
    if not sources:
        return v
    competes = depth.own == "softmax"
    keys = [*sources[0::2], *([k] if competes else [])]
    values = [*sources[1::2], *([v] if competes else [])]
    wide = torch.promote_types(v.dtype, torch.float32)
    q = q.to(wide).unflatten(1, (k.shape[1], -1))
    if depth.query == "mean_query":
        q = q.mean(2, keepdim=True)
    scores = torch.stack([(q * x.to(wide)[:, :, None]).sum(-1) for x in keys])
    share = ((depth.scale or q.shape[-1] ** -0.5) * scores).softmax(0).mean(3)  # [j, b, g, r]
    out = torch.zeros_like(v, dtype=wide)
    for a, w in zip(share, values, strict=True):
        out = out + a[..., None] * w
    return out.to(v.dtype) if competes else v + out.to(v.dtype)
