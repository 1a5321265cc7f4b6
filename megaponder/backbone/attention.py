"""The core of attention, between the projections: causal softmax over one set of keys or several.

Shapes: s rows, b micro-batch, h heads of this rank, g key/value heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from megaponder.backbone.context import Context
from megaponder.backbone.documents import Documents
from megaponder.backbone.merged_attention import all_heads, fused_is_possible, merged_causal
from megaponder.backbone.shared_attention import shared_causal


def _causal(rows_q: int, rows_k: int, device: torch.device, window: int = 0, slots: int = 1) -> Tensor:
    """True where query row i may see key row j, aligned at the bottom right: [rows_q, rows_k].

    With a window, only keys of its last `window` tokens, of `slots` rows each.
    """
    mask = torch.ones(rows_q, rows_k, dtype=torch.bool, device=device).tril(rows_k - rows_q)
    if not window:
        return mask
    token = torch.arange(rows_k, device=device) // slots
    return mask & (token > token[rows_k - rows_q :, None] - window)


GONE = -30000.0
"""Logit of a missing key: its probability is exactly 0 in every precision, without infinities."""
EXTRA = 8
"""Head channels that carry a key bias; fused kernels want head sizes that are multiples of 8."""


def _bias_channels(dtype: torch.dtype) -> int:
    """Channels whose sum holds an FP32 bias exactly."""
    return 1 if dtype in (torch.float32, torch.float64) else 3


def widen_query(q: Tensor) -> Tensor:
    """q with 8 more head channels, through which the keys of `widen_key` add their bias to the logits."""
    channels = _bias_channels(q.dtype)
    ones = torch.cat([q.new_ones(channels), q.new_zeros(EXTRA - channels)]).expand(*q.shape[:3], -1)
    return torch.cat([q, ones], -1)


def widen_key(k: Tensor, v: Tensor, key_bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """k and v with 8 more head channels: q' k'^T scale = q k^T scale + bias of the key; those of v are zeros.

    A fused causal kernel then needs no bias input, and yet the bias gets its gradient.  In BF16 the bias is three BF16
    values whose sum is exact (a log-weight near -9 would otherwise be off by 0.03); only the largest carries the
    gradient.
    """
    rest, channels = key_bias.float() / scale, []
    for _ in range(_bias_channels(k.dtype)):
        channels.append(rest.to(k.dtype))
        rest = (rest - channels[-1].float()).detach()
    zeros = k.new_zeros(*key_bias.shape, EXTRA - len(channels))
    extra = torch.cat([torch.stack(channels, dim=-1), zeros], dim=-1)[:, :, None].expand(-1, -1, k.shape[2], -1)
    return torch.cat([k, extra], -1), F.pad(v, (0, EXTRA))


class SdpaCore(nn.Module):
    """Causal softmax attention by PyTorch's fused kernels, within the config's window of tokens if it has one.

    `key_bias` [k rows, b] is added to the logits of its key; a token has `slots` rows; with `documents` it sees its own
    document only.  With `context` q, k and v hold a part of the sequence, and q sees the whole.
    """

    def __init__(self, config: Any = None, *_: Any, softmax_scale: float | None = None, **__: Any):
        super().__init__()
        self.scale = softmax_scale
        self.window = config.window_size[0] + 1 if config is not None and config.window_size else 0

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_bias: Tensor | None = None,
        slots: int = 1,
        documents: Documents | None = None,
        context: Context | None = None,
    ) -> Tensor:
        if context is not None:
            if self._fused(q, k.shape[0] * context.size, slots, documents):
                return self._shared(context, q, [k], [v], [key_bias])
            k, v = context.gather(k), context.gather(v)
            key_bias = None if key_bias is None else context.gather(key_bias)
        if key_bias is not None:
            d, scale = q.shape[-1], self.scale or q.shape[-1] ** -0.5
            return self._attend(widen_query(q), *widen_key(k, v, key_bias, scale), scale, slots, documents)[..., :d]
        return self._attend(q, k, v, self.scale, slots, documents)

    def bottom_right(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[rows, b, h, d] of q [rows, b, h, d] and k, v [more rows, b, g, d], whose last rows are those of q."""
        k, v = all_heads(k, q.shape[2]), all_heads(v, q.shape[2])
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        mask = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).permute(2, 0, 1, 3)

    def merged(
        self,
        q: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        alive: Sequence[Tensor | None],
        documents: Documents | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """One softmax over several sets of keys of n rows each, causal in tokens within every set.

        `alive` [n, b] per set is false at missing keys; None: all exist.  A row that sees no key gets arbitrary finite
        values.
        """
        n = keys[0].shape[0] * (1 if context is None else context.size)
        if self._fused(q, n, 1, documents):
            biases = [None if a is None else self._absence(a) for a in alive]
            if context is None:
                return self._merged(q, keys, values, biases)
            return self._shared(context, q, keys, values, biases)
        if context is not None:
            keys, values = ([context.gather(x) for x in sets] for sets in (keys, values))
            alive = [None if a is None else context.gather(a.to(torch.uint8)) > 0 for a in alive]
        window = self.window if n > self.window else 0
        exists = [torch.ones(n, q.shape[1], dtype=torch.bool, device=q.device) if a is None else a for a in alive]
        seen = _causal(n, n, q.device, window)[None] if documents is None else documents.visible(window=window)
        mask = seen.repeat(1, 1, len(keys)) & torch.cat(exists).t()[:, None]
        mask = mask | ~mask.any(-1, keepdim=True)
        k, v = (all_heads(torch.cat(list(x)), q.shape[2]) for x in (keys, values))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=self.scale)
        return out.permute(2, 0, 1, 3)

    def _fused(self, q: Tensor, rows: int, slots: int, documents: Documents | None) -> bool:
        """Whether kernels that return log-sums do: they know neither windows of so many rows nor documents."""
        apart = documents is not None and documents.apart
        return fused_is_possible(q) and not apart and not 0 < self.window * slots < rows

    @staticmethod
    def _absence(exists: Tensor) -> Tensor:
        """A missing key gets a logit of -30000."""
        return torch.zeros(exists.shape, device=exists.device).masked_fill(~exists, GONE)

    def _merged(
        self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> Tensor:
        """`merged` as one fused causal call per set."""
        d, scale = q.shape[-1], self.scale or q.shape[-1] ** -0.5
        wide, ready = self._biased(q, keys, values, biases, scale)
        ready = [[all_heads(x, q.shape[2]).permute(1, 2, 0, 3) for x in pair] for pair in ready]
        out = merged_causal(wide.permute(1, 2, 0, 3), [k for k, _ in ready], [v for _, v in ready], scale)
        return out.permute(2, 0, 1, 3)[..., :d]

    def _shared(
        self,
        context: Context,
        q: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> Tensor:
        """One softmax over the keys of all ranks of the context."""
        d, scale = q.shape[-1], self.scale or q.shape[-1] ** -0.5
        if any(bias is not None for bias in biases):
            q, ready = self._biased(q, keys, values, biases, scale)
            keys, values = [k for k, _ in ready], [v for _, v in ready]
        out = shared_causal(context, q.permute(1, 2, 0, 3), list(keys), list(values), scale)
        return out.permute(2, 0, 1, 3)[..., :d]

    @staticmethod
    def _biased(
        q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], biases: Sequence[Tensor | None], scale: float
    ) -> tuple[Tensor, list[Sequence[Tensor]]]:
        """q, and k and v of each set, whose logits have the set's bias."""
        ready: list[Sequence[Tensor]] = []
        for k, v, bias in zip(keys, values, biases, strict=True):
            none = torch.zeros(k.shape[:2], device=q.device)
            ready.append(widen_key(k, v, none if bias is None else bias, scale))
        return widen_query(q), ready

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, slots: int, documents: Documents | None
    ) -> Tensor:
        rows_q, rows_k = q.shape[0], k.shape[0]
        window = self.window if rows_k > self.window * slots else 0
        k, v = all_heads(k, q.shape[2]), all_heads(v, q.shape[2])
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [s, b, h, d] -> [b, h, s, d]
        if documents is not None:
            mask = documents.visible(slots, window)[:, None]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        elif rows_q == rows_k and not window:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            mask = _causal(rows_q, rows_k, q.device, window, slots)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out.permute(2, 0, 1, 3)
