"""What the rows of a pass read, and what all passes of one forward share.

Shapes: b batch, n tokens of this call, r = n * slots rows, t tokens cached before, k keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megaponder.decoding.cache import PonderCache, Rows
from megaponder.decoding.depth_attention import Entries

Values = Callable[[int, Tensor, Tensor], Tensor]


@dataclass
class View:
    """What the rows of one pass read: a mask and weights over keys, and where the keys come from."""

    attends: ClassVar[bool] = False
    """Whether the view computes attention itself, by `attend`."""
    positions: Tensor
    """[b, r] RoPE positions of the rows."""
    mask: Tensor | None
    """[1 or b, 1, r, k] True where a row may read a key, or what `added` makes; None: causal, or one that reads all."""
    weight: Tensor | None
    """[b, k] added to the logits of each key; None: 0."""
    cache: PonderCache | None
    tokens: tuple[Tensor, Tensor] | None
    """The tokens that the rows [1 or s, r] and the keys [1 or s, k] belong to; None: unknown, as in pages."""
    values: Values | None = field(default=None, kw_only=True)
    """What the method adds to values."""
    blocks: list[tuple[int, int, int]] = field(default_factory=list, kw_only=True)
    """(begin, end, keys) of rows that read the first `keys` keys alone, block after block; none: all at once."""
    of_all: Entries = field(default_factory=list, kw_only=True)
    """What layers of all passes so far have made of these rows (Depth-Attention)."""

    def within(self, window: int) -> View:
        """The same view of keys of the last `window` tokens only; 0: of all."""
        if not window:
            return self
        if self.tokens is None:
            raise ValueError(
                f"a sliding window ({window} tokens) needs this model's own cache: pages do not tell tokens"
            )
        row, key = self.tokens
        near = key[:, None] > row[..., None] - window
        if near.all():
            return self
        mask = self.mask
        if mask is None:
            mask = torch.ones_like(near).tril(near.shape[2] - near.shape[1])[:, None]
        return replace(self, mask=mask & near[:, None])

    def added(self, dtype: torch.dtype) -> View:
        """The same view with a mask that is added to logits, as fused attention wants it: made once for all layers."""
        if self.attends or self.mask is None or self.mask.dtype != torch.bool:
            return self
        *rows, keys = self.mask.shape
        bias = torch.zeros(*rows, keys + -keys % 16, dtype=dtype, device=self.mask.device)[..., :keys]  # aligned rows
        return replace(self, mask=bias.masked_fill_(~self.mask, float("-inf")))

    def join(self, entry: int, k: Tensor, v: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(keys, values that all rows read; keys, values of the new rows alone), each [b, groups, k or r, d].

        `before`: keys and values of the new rows in earlier passes of this layer, as far as the method keeps them.
        """
        if self.cache is None:
            return k, v, k, v
        after = None if self.tokens is None else self.tokens[1].shape[-1] - k.shape[2]
        return (*self.cache.update(k, v, entry, after), k, v)

    def kept(self, before: tuple[Tensor, ...], k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """`before` of the next pass."""
        return k, v

    def attend(self, module: Any, entry: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[b, heads, r, d] of queries [b, heads, r, d] and this pass's keys and values [b, groups, r, d]."""
        raise NotImplementedError

    def spread(self, q: Tensor) -> Tensor:
        """Queries [b, heads, r, d] as attention computes them."""
        return q

    def collected(self, out: Tensor) -> Tensor:
        """The inverse of `spread`, for what attention makes of queries."""
        return out


class Reading(View):
    """Another pass over the same rows, which reads what the pass of the view stored, and stores nothing."""

    def join(self, entry: int, k: Tensor, v: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.cache is None:
            return (*before, *before)
        stored = self.cache.layers[entry]
        assert stored.keys is not None and stored.values is not None
        return stored.keys, stored.values, k, v

    def kept(self, before: tuple[Tensor, ...], k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return before


@dataclass
class Run:
    """What all passes of one forward share."""

    positions: Tensor
    """[b, n] RoPE positions (or rows of the position table) of the new tokens."""
    keep: Tensor | None
    """[b, t + n] True at real tokens; None: no padding."""
    cache: PonderCache | None
    past: int
    """t: tokens that the cache held when this forward began."""
    given: dict[str, Any] = field(default_factory=dict)
    """The method's own arguments of this forward (`DecodingMethod.arguments`)."""
    rows: dict[int, Rows] = field(default_factory=dict)
    """By pass: all stored rows, including those of this forward."""
    values: Values | None = None
    """What the method makes of the values that a layer projects: (entry, its input [b, r, H], values [b, r, g d])."""
    views: dict[int, View] = field(default_factory=dict)
    """By entry of keys and values (see `entry`)."""
    depth: Tensor | None = None
    """[b, n] passes that each new token ran, 0 at padding; None if the method does not say."""
    earlier: Entries = field(default_factory=list)
    """What layers of all passes so far have made of the new rows (Depth-Attention)."""

    @property
    def real(self) -> Tensor:
        """[b, n] True at the new tokens that are not padding."""
        everyone = torch.ones_like(self.positions, dtype=torch.bool)
        return everyone if self.keep is None else self.keep[:, self.past :]

    def single(self, i: int) -> Run:
        """Only new token i, when those before it are in the cache."""
        end = self.past + i + 1
        keep = None if self.keep is None else self.keep[:, :end]
        return Run(self.positions[:, i : i + 1], keep, self.cache, end - 1, self.given)

    def add(self, index: int, slots: int = 1, alive: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Announce the rows of pass `index`, alive and weight [b, r]; returns their tokens [r]."""
        token = self.past + torch.arange(self.positions.shape[1], device=self.positions.device)
        # without dead rows no mask is needed
        new = Rows(token.repeat_interleave(slots), None if alive is None or alive.all() else alive, weight)
        self.rows[index] = new if self.cache is None else self.cache.add(index, new)
        return new.token

    def view(self, index: int = 0, slots: int = 1, alive: Tensor | None = None, weight: Tensor | None = None) -> View:
        """A pass whose rows read the rows of the same pass, themselves and those before."""
        token, rows = self.add(index, slots, alive, weight), self.rows[index]
        positions = self.positions.repeat_interleave(slots, dim=1)
        tokens = (token[None], rows.token[None])
        more: dict[str, Any] = {"values": self.values, "of_all": self.earlier}
        return View(positions, self.mask(index, slots), rows.weight, self.cache, tokens, **more)

    def entry(self, index: int, part: range | None = None) -> View:
        """A pass, of one row for each token, with the keys and values `index` of all layers, or those of a part.

        Of passes of this forward that name the same, the later replace what the earlier stored of the new tokens; where
        tokens before have none there, those of the last pass that they ran stand in.
        """
        if index not in self.views:
            if self.cache is not None and self.past:
                self.cache.complete(index, part)
            self.views[index] = self.view(index)
        return self.views[index]

    def draft(self, slots: int, alive: Tensor | None = None, weight: Tensor | None = None) -> View:
        """A pass over whole sequences that leaves nothing in the cache, which is empty."""
        return replace(self, cache=None, rows={}, views={}).view(0, slots, alive, weight)

    def mask(self, index: int, slots: int = 1) -> Tensor | None:
        """The mask of a `View` whose rows read the rows of pass `index` up to themselves."""
        order = torch.arange(len(self.rows[index].token), device=self.positions.device)
        return readable(order[-self.positions.shape[1] * slots :], order, self.there([self.rows[index]]))

    def there(self, seen: list[Rows]) -> Tensor | None:
        """[b, k] True at keys that exist: of real tokens, alive; None: all of them."""
        there = None if self.keep is None else torch.cat([self.keep[:, rows.token] for rows in seen], dim=1)
        if any(rows.alive is not None for rows in seen):
            b = self.positions.shape[0]
            alive = [r.token.new_ones(b, len(r.token)).bool() if r.alive is None else r.alive for r in seen]
            there = torch.cat(alive, dim=1) if there is None else there & torch.cat(alive, dim=1)
        return there


def readable(query: Tensor, key: Tensor, there: Tensor | None) -> Tensor | None:
    """The mask of a `View`: rows of order `query` [r] read the keys of order `key` [k] <= it if `there` [b, k]."""
    if there is None and (len(query) == 1 or len(query) == len(key)):
        return None
    mask = (key <= query[:, None])[None]
    if there is not None:
        # a missing row still reads itself: its result is never used, but a softmax over nothing would be NaN
        mask = (mask & there[:, None]) | (key == query[:, None])
    return mask[:, None]
