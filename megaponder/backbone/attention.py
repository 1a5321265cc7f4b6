"""Self-attention whose core a pondering method can see: projections and RoPE by megatron-core, the middle by a hook.

Shapes: s rows, b micro-batch, h heads of this rank, g key/value heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

Kept = tuple[Tensor, ...]
Attend = Callable[[Tensor, Tensor, Tensor, Kept, Callable[..., Tensor]], tuple[Tensor, Kept]]


def _causal(rows_q: int, rows_k: int, device: torch.device) -> Tensor:
    """True where query row i may see key row j, aligned at the bottom right: [rows_q, rows_k]."""
    return torch.ones(rows_q, rows_k, dtype=torch.bool, device=device).tril(rows_k - rows_q)


class SdpaCore(nn.Module):
    """Causal softmax attention by PyTorch's fused kernels; `key_bias` [k rows, b] is added to the logits of its key."""

    def __init__(self, *_: Any, softmax_scale: float | None = None, **__: Any):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None = None) -> Tensor:
        rows_q, rows_k = q.shape[0], k.shape[0]
        repeat = q.shape[2] // k.shape[2]
        if repeat > 1:  # grouped-query attention
            k, v = k.repeat_interleave(repeat, dim=2), v.repeat_interleave(repeat, dim=2)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [s, b, h, d] -> [b, h, s, d]
        if key_bias is None and rows_q == rows_k:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            mask = _causal(rows_q, rows_k, q.device)
            if key_bias is not None:
                bias = key_bias.t()[:, None, None, :].to(q.dtype)
                mask = torch.where(mask, bias, torch.full((), float("-inf"), dtype=q.dtype, device=q.device))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return out.permute(2, 0, 1, 3)


class PonderAttention(SelfAttention):
    """megatron-core's self-attention with `attend(q, k, v, kept, core) -> (output, kept)` in its middle."""

    def forward(
        self, hidden_sbh: Tensor, rotary: Tensor | None, attend: Attend, kept: Kept
    ) -> tuple[Tensor, Tensor | None, Kept]:
        q, k, v = self.get_query_key_value_tensors(hidden_sbh)
        if rotary is not None:
            q = apply_rotary_pos_emb(q, rotary, config=self.config, cp_group=self.pg_collection.cp)
            k = apply_rotary_pos_emb(k, rotary, config=self.config, cp_group=self.pg_collection.cp)
        out, kept = attend(q, k, v, kept, self.core_attention)
        projected, bias = self.linear_proj(out.reshape(*out.shape[:2], -1))
        return projected, bias, kept
