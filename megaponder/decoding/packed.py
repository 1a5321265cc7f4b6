"""A pass over rows of several sequences side by side, each sequence with as many as it has.

Shapes: m rows (one token in one pass), s sequences with rows, r rows of the fullest, k keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megaponder.decoding.passes import View
from megaponder.decoding.slots import Slots

BLOCK = 1024
"""Rows of a sequence that attention computes at once where there is a mask: none needs keys after its own token."""


@dataclass
class Packed(View):
    """Rows [1, m, H] of several sequences side by side, which read keys by slot."""

    store: Slots
    slots: Tensor
    """[m] of the rows."""
    table: Tensor
    """[s, k] slots that the rows of each sequence may read, as far as `mask` [s, 1, r, k] lets them."""
    place: Tensor | None
    """[m] where each row stands among the s x r rows that attention computes; None: where it is."""
    shape: tuple[int, int]
    """(s, r)."""
    layers: int
    """Of the stack."""

    def join(self, entry: int, k: Tensor, v: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        k, v = k[0].transpose(0, 1), v[0].transpose(0, 1)
        if self.store.stored:
            self.store.write(entry % self.layers, self.slots, k, v)
            read = self.store.read(entry % self.layers, self.table)
        else:
            if before and self.store.merge:
                k, v = torch.cat([before[0], k]), torch.cat([before[1], v])
            elif before:
                k, v = before[0].index_copy(0, self.slots, k), before[1].index_copy(0, self.slots, v)
            read = (k[self.table], v[self.table])
        return (*(x.transpose(1, 2) for x in read), k, v)

    def kept(self, before: tuple[Tensor, ...], k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return () if self.store.stored else (k, v)

    def spread(self, q: Tensor) -> Tensor:
        if self.shape[0] == 1 and self.place is None:
            return q
        q = q[0].transpose(0, 1)
        if self.place is not None:
            q = q.new_zeros(self.shape[0] * self.shape[1], *q.shape[1:]).index_copy(0, self.place, q)
        return q.unflatten(0, self.shape).transpose(1, 2)

    def collected(self, out: Tensor) -> Tensor:
        if self.shape[0] == 1 and self.place is None:
            return out
        out = out.transpose(1, 2).flatten(0, 1)
        return (out if self.place is None else out[self.place]).transpose(0, 1)[None]


def packed(
    store: Slots, layers: int, index: int, seq: Tensor, token: Tensor, positions: Tensor, weight: Tensor | None = None
) -> Packed:
    """Rows [m] of pass `index`, ordered by sequence and token, each of which reads its own and earlier tokens."""
    slots = store.allot(index, seq, token, weight)
    if not len(seq):
        nothing = token[None]
        return Packed(
            positions[None], None, None, None, (nothing, nothing), store, slots, slots[None], None, (1, 0), layers
        )
    there, rows = torch.unique_consecutive(seq, return_counts=True)
    most, last, earliest = torch.stack([rows.max(), token.max(), token.min()]).tolist()
    shape = (len(there), most)
    keys, key_token = store.keys_of(index, there, last)
    place, row_token = None, token.view(-1, 1)
    exists, begin = keys >= 0, rows.cumsum(0) - rows
    line = torch.arange(shape[0], device=seq.device).repeat_interleave(rows)
    own = not store.merge and most > 1 and 2 * len(seq) >= keys.numel()
    if own := own and bool((exists | (key_token > token[begin + rows - 1][:, None])).all()):
        # Most tokens have a row, and what is missing comes after all rows of its sequence.  Where each stands at its
        # token's place, attention is plainly causal: it computes half of the square, and needs no mask.
        shape, row_token = (shape[0], last + 1), key_token
        place = None if len(seq) == keys.numel() else line * (last + 1) + token
    elif shape[0] * shape[1] != len(seq):
        place = line * shape[1] + torch.arange(len(seq), device=seq.device) - begin[line]
        filled = token[begin].repeat_interleave(shape[1])  # rows that do not exist read what the first one reads
        row_token = filled.index_copy(0, place, token)
    row_token = row_token.view(shape)
    mask: Tensor | None = None
    causal = shape[1] == keys.shape[1] and (shape[1] == 1 or own or bool((row_token == key_token).all()))
    newest = shape[1] == 1 and earliest == last  # of every sequence the last token alone: it reads all
    if not own and not ((causal or newest) and bool(exists.all())):
        mask = (key_token[:, None] <= row_token[..., None]) & exists[:, None]
        mask = None if shape[1] == 1 and bool(mask.all()) else mask[:, None]
    blocks: list[tuple[int, int, int]] = []
    if mask is not None and not store.merge and shape[1] > BLOCK:  # keys stand in the order of tokens
        begins = range(0, shape[1], BLOCK)
        ends = torch.stack([row_token[:, i : i + BLOCK].max() for i in begins]).tolist()
        blocks = [(i, min(i + BLOCK, shape[1]), end + 1) for i, end in zip(begins, ends, strict=True)]
    weights = None if store.weight is None else store.weight[keys.clamp(min=0)]
    tokens = (row_token, key_token)
    given = (store, slots, keys.clamp(min=0), place, shape, layers)
    return Packed(positions[None], mask, weights, None, tokens, *given, blocks=blocks)
