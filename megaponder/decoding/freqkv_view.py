"""FreqKV in decoding: a cache of at most `capacity` rows for each layer and pass, compressed when it is full.

A row of the cache is also the position at which its key is rotated, so between two compressions nothing moves.  When
the next token finds the cache full, keys are turned back, compressed like values, and turned to their new places.
Which row a token takes follows from its position in its text alone: sequences of a batch that began elsewhere, behind
padding, are compressed when it is their turn.

New tokens are taken in segments that begin where any sequence is compressed: a whole text computes what its tokens do
one by one.

Shapes: b batch, n tokens of this call, C capacity, F memory, k rows of the cache that are read, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from megaponder.decoding.backbone import rotary_tables, rotate
from megaponder.decoding.cache import Entry, PonderCache
from megaponder.decoding.freqkv import resample, slots
from megaponder.decoding.freqkv_blocks import FreqKV
from megaponder.decoding.passes import Run, View


class Compressed(Entry):
    """Keys, rotated at their rows, and values [b, groups, rows up to C, d] of one layer in one pass."""

    tokens = 0
    """That are in them."""
    least = 0
    """Fewer cannot be kept: those after have been compressed together with those before."""

    def crop(self, tokens: int) -> None:
        if self.keys is None or tokens >= self.tokens:
            return
        if tokens < self.least:
            raise ValueError(
                f"crop({tokens}): FreqKV has compressed these tokens together with later ones; it can go back to "
                f"{self.least} tokens"
            )
        self.tokens = tokens


@dataclass
class Segment:
    """New tokens between two compressions."""

    columns: slice
    due: Tensor | None
    """[b] sequences that are compressed before; None: none."""
    at: Tensor
    """[b, n'] rows that the tokens take."""
    real: Tensor | None
    """[b, n'] False at padding, which takes none; None: all sequences have the same tokens."""
    rows: int
    """k."""
    mask: Tensor | None
    """[1 or b, 1, n', k]; None: plain causal, or one token that reads everything."""

    def put(self, held: Tensor, new: Tensor) -> Tensor:
        """The rows `held` [b, g, r, d] with those of the new tokens [b, g, n, d]."""
        new = new[:, :, self.columns]
        if self.real is None:
            first = self.rows - new.shape[2]
            return torch.cat([held[:, :, :first], new, held[:, :, self.rows :]], dim=2)
        size = max(self.rows, held.shape[2])
        index = torch.where(self.real, self.at, size)  # one row more, for padding
        held = F.pad(held, (0, 0, 0, size + 1 - held.shape[2]))
        return held.scatter(2, index[:, None, :, None].expand_as(new), new)[:, :, :size]


def segments(feature: FreqKV, positions: Tensor, real: Tensor) -> list[Segment]:
    """Of new tokens at these positions of their texts, both [b, n]."""
    at = slots(feature, positions)
    due = real & (positions >= feature.capacity) & (at == feature.memory)
    alike = bool(real.all()) and bool((positions == positions[:1]).all())
    cuts = [0, *(i for i in due.any(0).nonzero().flatten().tolist() if i), positions.shape[1]]
    found = []
    for begin, end in pairwise(cuts):
        columns, count = slice(begin, end), end - begin
        now, there = at[:, columns], real[:, columns]
        rows = int(now[there].max()) + 1 if bool(there.any()) else 1
        mask = None
        if not alike:
            mask = (torch.arange(rows, device=at.device) <= now[..., None])[:, None]
        elif 1 < count < rows:
            mask = torch.ones(count, rows, dtype=torch.bool, device=at.device).tril(rows - count)[None, None]
        before = due[:, begin] if bool(due[:, begin].any()) else None
        found.append(Segment(columns, before, now, None if alike else there, rows, mask))
    return found


@dataclass
class CompressedView(View):
    """A pass whose rows read their cache through its memory."""

    attends: ClassVar[bool] = True
    feature: FreqKV = field(kw_only=True)
    segments: list[Segment] = field(kw_only=True)
    past: int = field(kw_only=True)
    """Tokens that the cache held before."""

    def attend(self, module: Any, entry: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        held = self._entry(entry)
        keys = k[:, :, :0] if held.keys is None else held.keys
        values = v[:, :, :0] if held.values is None else held.values
        out = []
        for s in self.segments:
            if s.due is not None:
                keys, values = self._compressed(module, s.due, keys, values)
                held.least = self.past + s.columns.start + 1
            keys, values = s.put(keys, k), s.put(values, v)
            out.append(module.softmax(q[:, :, s.columns], keys[:, :, : s.rows], values[:, :, : s.rows], s.mask, None))
        held.keys, held.values, held.tokens = keys, values, self.past + k.shape[2]
        return torch.cat(out, dim=2) if len(out) > 1 else out[0]

    def _entry(self, number: int) -> Compressed:
        if self.cache is None:
            return Compressed()
        while len(self.cache.layers) <= number:
            self.cache.layers.append(Compressed())
        found = self.cache.layers[number]
        assert isinstance(found, Compressed)
        if found.tokens != self.past:
            raise ValueError(
                "with FreqKV each pass of a token has keys and values of its own, in every call: here a pass has "
                f"those of {found.tokens} tokens, and {self.past} came before; leave out kv_budget and exits, and run "
                "as many passes in every call"
            )
        return found

    def _compressed(self, module: Any, due: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [b, g, C, d], full where `due` [b]; rows from the memory's on are then free."""
        f, wide = self.feature, torch.promote_types(keys.dtype, torch.float32)
        tables = rotary_tables(module.config, torch.arange(f.capacity, device=keys.device)[None], wide)
        assert tables is not None
        cos, sin = (x.transpose(1, 2) for x in tables)
        size = (cos.square() + sin.square())[..., f.sink :, :]  # YaRN's factor, twice
        back = cos[..., f.sink :, :] / size, -sin[..., f.sink :, :] / size
        again = cos[..., f.sink : f.memory, :], sin[..., f.sink : f.memory, :]

        def shorter(x: Tensor) -> Tensor:
            return resample(x.movedim(2, 0), f.kept).movedim(0, 2)

        def replaced(old: Tensor, short: Tensor) -> Tensor:
            new = torch.cat([old[:, :, : f.sink], short.to(old.dtype), old[:, :, f.memory :]], dim=2)
            return new if bool(due.all()) else torch.where(due[:, None, None, None], new, old)

        raw = rotate(keys[:, :, f.sink :].to(wide), back, module.adjacent)
        return (
            replaced(keys, rotate(shorter(raw), again, module.adjacent)),
            replaced(values, shorter(values[:, :, f.sink :])),
        )


@dataclass
class CompressedRun(Run):
    """The passes of one forward, each with one row for a token and a memory of its own."""

    feature: FreqKV = field(kw_only=True)
    _segments: list[Segment] | None = None

    def view(self, index: int = 0, slots: int = 1, alive: Tensor | None = None, weight: Tensor | None = None) -> View:
        if slots != 1 or alive is not None or weight is not None:
            raise ValueError("FreqKV counts tokens: it has no memory for rows that stand beside a token's own")
        return self._view()

    def entry(self, index: int, part: range | None = None) -> View:
        return self.views.setdefault(index, self._view())

    def _view(self) -> View:
        if self._segments is None:
            self._segments = segments(self.feature, self.positions, self.real)
        more: dict[str, Any] = {"feature": self.feature, "segments": self._segments, "past": self.past}
        more |= {"values": self.values, "of_all": self.earlier}
        return CompressedView(slots(self.feature, self.positions), None, None, self.cache, None, **more)


def run_of(feature: FreqKV | None, run: Run) -> Run:
    """The same run, with the feature if there is one."""
    if feature is None:
        return run
    if run.cache is not None:
        run.cache.is_croppable = False
    return CompressedRun(run.positions, run.keep, run.cache, run.past, run.given, feature=feature)


def new_cache(feature: FreqKV | None, layers: int) -> PonderCache:
    """An empty cache; with the feature none that goes back at will."""
    cache = PonderCache(layers)
    cache.is_croppable = feature is None
    return cache
