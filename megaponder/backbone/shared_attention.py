"""Causal attention of ranks that share a sequence, without masks: queries of this rank, keys of all.

Queries of a piece see all keys of the pieces before it, and those of their own piece up to themselves.  So a piece is
one fused call without a mask and a causal one for each set of keys, merged by log-sum-exp as in `merged_attention`.
For the backward a rank keeps its own keys and values only, and gathers those of the others once more.

Shapes: q [b, h, s, d]; keys and values [s, b, g, d], g heads of which each serves h / g query heads; n = s * CP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaponder.backbone.context import Context
from megaponder.backbone.merged_attention import all_heads, backward_call, combined, forward_call


def _own_heads(x: Tensor, groups: int) -> Tensor:
    """Gradients of keys or values of every query head [b, h, n, d] -> [n, b, g, d], summed over those of a head."""
    return x.unflatten(1, (groups, -1)).sum(2).permute(2, 0, 1, 3)


def _calls(piece: int, rows: int) -> list[tuple[slice, bool]]:
    """(keys, whether causal) of the fused calls for the queries of a piece of so many rows."""
    first = piece * rows
    before = [(slice(0, first), False)] if piece else []
    return [*before, (slice(first, first + rows), True)]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Context, scale: float, q: Tensor, *keys_values: Tensor) -> Tensor:
        pairs = _whole(context, q.shape[1], keys_values)
        outs, lses, rests = [], [], []
        for piece, part in zip(context.pieces, q.chunk(2, dim=2), strict=True):
            found = [
                forward_call(part, k[:, :, seen], v[:, :, seen], scale, causal)
                for k, v in pairs
                for seen, causal in _calls(piece, part.shape[2])
            ]
            out, lse = combined([one[0] for one in found], [one[1] for one in found])
            outs.append(out.to(q.dtype))
            lses.append(lse)
            rests.append([one[2:] for one in found])
        whole, lse = torch.cat(outs, dim=2), torch.cat(lses, dim=2)
        ctx.save_for_backward(q, whole, lse, *keys_values)
        ctx.context, ctx.scale, ctx.rests = context, scale, rests
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *keys_values = ctx.saved_tensors
        context, sets = ctx.context, len(keys_values) // 2
        pairs = _whole(context, q.shape[1], keys_values)
        gathered = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in pairs]
        halves = zip(context.pieces, *(x.chunk(2, dim=2) for x in (grad, q, out, lse)), ctx.rests, strict=True)
        to_queries = []
        for piece, g, part, o, total, rests in halves:
            left, dq = iter(rests), torch.zeros_like(part)
            for (k, v), (dk, dv) in zip(pairs, gathered, strict=True):
                for seen, causal in _calls(piece, part.shape[2]):
                    given = (part, k[:, :, seen], v[:, :, seen], o.contiguous(), total.contiguous(), next(left))
                    found = backward_call(g.contiguous(), *given, ctx.scale, causal)
                    dq += found[0]
                    dk[:, :, seen] += found[1]
                    dv[:, :, seen] += found[2]
            to_queries.append(dq)
        groups = keys_values[0].shape[2]
        own = [context.add_up(_own_heads(x, groups)) for x in (*(k for k, _ in gathered), *(v for _, v in gathered))]
        assert len(own) == 2 * sets
        return (None, None, torch.cat(to_queries, dim=2), *own)


def _whole(context: Context, heads: int, keys_values: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the whole sequence, for every query head."""
    whole = [all_heads(context.gather(x), heads).permute(1, 2, 0, 3) for x in keys_values]
    sets = len(whole) // 2
    return list(zip(whole[:sets], whole[sets:], strict=True))


def shared_causal(context: Context, q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """softmax over all sets of keys, each row seeing those up to its own place: [b, h, s, d]."""
    out: Tensor = _Shared.apply(context, scale, q, *keys, *values)
    return out
