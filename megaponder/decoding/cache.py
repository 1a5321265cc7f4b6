"""Keys and values of all passes, and descriptions of their rows.

Shapes: b batch, r rows of a pass, k keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from megaponder.decoding.slots import Slots


@dataclass
class Rows:
    """The rows of one pass in the cache; the same in all layers."""

    token: Tensor
    """[r] the token that each row belongs to; non-decreasing."""
    alive: Tensor | None = None
    """[b, r] False where a row exists only for other sequences of the batch; None: all alive."""
    weight: Tensor | None = None
    """[b, r] added to the attention logits of the row's key; None: 0."""

    def joined(self, new: Rows) -> Rows:
        """These rows and then the new ones."""
        return Rows(
            torch.cat([self.token, new.token]),
            _joined(self.alive, new.alive, self.token, new.token, True),
            _joined(self.weight, new.weight, self.token, new.token, 0.0),
        )

    def at(self, rows: slice | Tensor) -> Rows:
        """Some of the rows."""
        return Rows(self.token[rows], *(None if x is None else x[:, rows] for x in (self.alive, self.weight)))

    def over_batch(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """The rows of a changed batch, by `change` [b, r] -> [b', r]."""
        return Rows(self.token, *(None if x is None else change(x) for x in (self.alive, self.weight)))


def _joined(a: Tensor | None, b: Tensor | None, rows_a: Tensor, rows_b: Tensor, absent: float) -> Tensor | None:
    """[b, r + r'] where either half may be None."""
    there = a if a is not None else b
    if there is None:
        return None
    halves = ((a, rows_a), (b, rows_b))
    return torch.cat(
        [there.new_full((there.shape[0], len(rows)), absent) if x is None else x for x, rows in halves], dim=1
    )


class Entry:
    """Keys and values [b, groups, rows, head size] of one layer in one pass."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, after: int | None = None) -> tuple[Tensor, Tensor]:
        """Append rows, in place of those from row `after` on; returns all keys and values."""
        if self.keys is not None and self.values is not None:
            if after is not None and after < self.keys.shape[2]:
                self.change(lambda x: x[:, :, :after])
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values

    def crop(self, tokens: int) -> None:
        """ValueError where the state after so many tokens is gone."""

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Other rows, or those of another batch, by `change` of keys and values alike."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = change(self.keys), change(self.values)


class PonderCache(DynamicCache):
    """Keys and values of every pass: entry `pass * layers + layer`.  Passes may share entries (see `Run.entry`).

    A pass may hold any number of rows for a token: slots, or none if no sequence of the batch ran it.  `rows` records
    which; the length is counted in tokens, as `generate` expects.  Beam reordering and cropping apply to everything.
    Nothing of the base class is used but its name: its fields and methods differ between releases of transformers.
    """

    is_compileable = is_sliding = offloading = False
    is_croppable = True

    def __init__(self, layers: int):
        self.layers: list[Entry] = []
        self.layers_a_pass = layers
        self.tokens = 0
        self.rows: dict[int, Rows] = {}
        self.slots: Slots | None = None
        """Keys and values of a method whose tokens halt; `layers` and `rows` are those of the others."""
        self.ran: Tensor | None = None
        """[b, t] passes of each token, where the method says; else its rows tell."""

    def by_slot(self, sequences: int, merge: bool, device: torch.device, budget: int = 0) -> Slots:
        """The slots of a batch, made at the first call."""
        if self.slots is None:
            self.slots = Slots(sequences, merge, device=device, budget=budget)
        return self.slots

    def depths(self) -> Tensor | None:
        """[b, t] rows that each token has: the passes that it ran, or its slots; None for an empty cache."""
        if self.ran is not None:
            return self.ran
        if self.slots is not None:
            return self.slots.depths()
        count: Tensor | None = None
        for rows in self.rows.values():
            alive = torch.ones_like(rows.token)[None] if rows.alive is None else rows.alive.long()
            new = alive.new_zeros(len(alive), self.tokens).index_add(1, rows.token, alive)
            count = new if count is None else count + new
        return count

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def activate_past_recording(self) -> None:
        """Nothing: `crop` always works."""

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1  # no limit

    def note(self, depth: Tensor) -> None:
        """Passes [b, n] that new tokens ran."""
        self.ran = depth if self.ran is None else torch.cat([self.ran, depth], dim=1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, after: Any = None, *_: Any
    ) -> tuple[Tensor, Tensor]:
        """Append rows to an entry, in place of those from row `after` on; returns all of its keys and values."""
        while len(self.layers) <= layer_idx:
            self.layers.append(Entry())
        return self.layers[layer_idx].update(key_states, value_states, after if isinstance(after, int) else None)

    def add(self, index: int, new: Rows) -> Rows:
        """Announce rows that pass `index` is about to store; returns all rows of that pass."""
        self.rows[index] = self.rows[index].joined(new) if index in self.rows else new
        return self.rows[index]

    def complete(self, index: int, part: range | None = None) -> None:
        """Tokens that did not run pass `index` get a copy of their keys and values of the pass before it."""
        held = len(self.rows[index].token) if index in self.rows else 0
        if not index or held == self.tokens:
            return
        lacking = slice(held, self.tokens)
        self.add(index, self.rows[index - 1].at(lacking))
        for layer in range(self.layers_a_pass) if part is None else part:
            source = self.layers[(index - 1) * self.layers_a_pass + layer]
            assert source.keys is not None and source.values is not None
            held_rows = (source.keys[:, :, lacking], source.values[:, :, lacking])
            self.update(*held_rows, index * self.layers_a_pass + layer)

    def retain(self, index: int, rows: slice | Tensor) -> None:
        """Keep only these rows of a pass."""
        self.rows[index] = self.rows[index].at(rows)
        first = index * self.layers_a_pass
        for entry in self.layers[first : first + self.layers_a_pass]:  # the last pass may lack its last layers
            entry.change(lambda x: x[:, :, rows])
        if not len(self.rows[index].token):
            del self.rows[index]
            self.layers[first : first + self.layers_a_pass] = [Entry() for _ in range(self.layers_a_pass)]

    def drop_dead(self, index: int) -> None:
        """Drop the rows of a pass that no sequence of the batch ran."""
        alive = self.rows[index].alive
        if alive is not None and not alive.all():
            self.retain(index, alive.any(0).nonzero()[:, 0])
            if index in self.rows and self.rows[index].alive.all():  # type: ignore[union-attr]
                self.rows[index].alive = None

    def crop(self, tokens: int) -> None:
        """Keep the first `tokens` tokens; a negative number removes as many, and 0 removes nothing."""
        if tokens == 0:
            return
        tokens = tokens if tokens >= 0 else max(0, self.tokens + tokens)
        for entry in self.layers:
            entry.crop(tokens)
        for index, rows in list(self.rows.items()):
            if tokens < self.tokens:
                self.retain(index, slice(int((rows.token < tokens).sum())))
        if self.slots is not None:
            self.slots.crop(min(tokens, self.tokens))
        self.tokens = min(tokens, self.tokens)
        self.ran = self.ran[:, : self.tokens] if self.ran is not None and self.tokens else None

    def reset(self) -> None:
        self.layers.clear()
        self.rows.clear()
        self.tokens, self.slots, self.ran = 0, None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._over_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._over_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._over_batch(lambda x: x[indices.to(x.device)])

    def _over_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        self.rows = {index: rows.over_batch(change) for index, rows in self.rows.items()}
        if self.slots is not None:
            self.slots.over_batch(change)
        self.ran = None if self.ran is None else change(self.ran)
        for entry in self.layers:
            entry.change(change)
