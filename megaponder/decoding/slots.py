"""Keys and values by slot: one slot for each pass that a token ran, so that memory is the sum of depths.

A table says which slot every pass of every token reads.  A pass reads one key of each token: its own or, where the
token has halted, that of its last pass.  Or, with `merge`, it reads the keys of all passes so far.  With a `budget` a
token has so many slots at most: pass i takes the slot of pass i - budget, and replaces what that held.

Shapes: b sequences, p passes, t tokens, m rows (one token in one pass), s sequences with rows, k keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

SPARE = 64
"""Capacity grows to 1 / SPARE more than is needed, so each slot is copied SPARE times."""


class Slots:
    """Slots of a batch, and what they hold in each layer; without `stored`, layers hand that on from pass to pass."""

    def __init__(
        self,
        sequences: int,
        merge: bool,
        stored: bool = True,
        device: torch.device | str | None = None,
        budget: int = 0,
    ):
        self.merge, self.stored, self.budget, self.used = merge, stored, budget, 0
        self.table = torch.full((sequences, 0, 0), -1, dtype=torch.long, device=device)
        """[b, p, t] the slot of each pass of each token; -1: none."""
        self.pool: list[Tensor] = []
        """By layer, keys and values [capacity, 2, groups, d]."""
        self.weight: Tensor | None = None
        """[capacity] added to the attention logits of a slot's key; None: 0."""

    @property
    def bytes(self) -> int:
        """Of all keys and values held, spare capacity included."""
        return sum(x.numel() * x.element_size() for x in self.pool)

    def extend(self, tokens: int) -> None:
        """Make room in the table for new tokens of every sequence."""
        self.table = F.pad(self.table, (0, tokens), value=-1)

    def allot(self, index: int, seq: Tensor, token: Tensor, weight: Tensor | None = None) -> Tensor:
        """[m] new slots for pass `index` of tokens `token` of sequences `seq`."""
        while (p := self.table.shape[1]) <= index:
            b, _, t = self.table.shape
            before = p - self.budget if 0 < self.budget <= p else p - 1
            deepest = self.table[:, before, None] if p and not self.merge else self.table.new_full((b, 1, t), -1)
            self.table = torch.cat([self.table, deepest], dim=1)
        if not self.stored and not self.merge and index:
            return self.table[seq, 0, token]  # an earlier pass's keys are read no more
        if 0 < self.budget <= index:
            return self.table[seq, index - self.budget, token]
        slots = torch.arange(self.used, self.used + len(seq), device=seq.device)
        self.used += len(seq)
        if self.merge:
            self.table[seq, index, token] = slots
        else:
            self.table[seq[:, None], self.readers(index), token[:, None]] = slots[:, None]
        if weight is not None:
            old = weight.new_zeros(0) if self.weight is None else self.weight
            self.weight = F.pad(old, (0, max(0, self.used - len(old)))).index_copy(0, slots, weight)
        return slots

    def readers(self, index: int) -> Tensor:
        """[p] the passes that read the slot of pass `index` of a token, unless the token runs more of them."""
        passes = torch.arange(self.table.shape[1], device=self.table.device)
        return passes[(passes % self.budget if self.budget else passes) >= index]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [m, groups, d]."""
        new = torch.stack([k, v], dim=1)
        if layer == len(self.pool):
            self.pool.append(new[:0])
        if len(held := self.pool[layer]) < self.used:
            self.pool[layer] = new.new_empty(self.used + self.used // SPARE, *new.shape[1:])
            if len(held):
                self.pool[layer][: len(held)] = held
        self.pool[layer].index_copy_(0, slots, new)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, ...]:
        """Keys and values [s, k, groups, d] of slots [s, k]."""
        found = self.pool[layer].index_select(0, table.flatten()).unflatten(0, table.shape)
        return found.unbind(2)

    def keys_of(self, index: int, seq: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """(slots, tokens) [s, k]: what pass `index` of sequences `seq` [s] may read up to token `last`; -1: nothing."""
        if not self.merge:
            found = self.table[seq, index, : last + 1]
            return found, torch.arange(last + 1, device=seq.device).expand_as(found)
        found = self.table[seq, : index + 1, : last + 1].flatten(1)
        there = found >= 0
        first = there.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : int(there.sum(1).max())]
        return found.gather(1, first), first % (last + 1)

    def compact(self) -> None:
        """Give up slots that no table names."""
        held, inverse = torch.unique(self.table[self.table >= 0], return_inverse=True)
        self.table[self.table >= 0] = inverse
        self.used = len(held)
        self.pool = [x[held] for x in self.pool]
        self.weight = None if self.weight is None else self.weight[held]

    def crop(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        self.table = self.table[..., :tokens]
        self.compact()

    def over_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Other sequences, by `change` [b, ...] -> [b', ...]; copies of a sequence share what they have in common."""
        self.table = change(self.table)
        self.compact()

    def depths(self) -> Tensor:
        """[b, t] passes that each token ran."""
        if self.merge or not self.table.shape[1]:
            return (self.table >= 0).sum(1)
        own = torch.cat([self.table[:, :1] >= 0, self.table[:, 1:] != self.table[:, :-1]], dim=1)
        return own.sum(1)
