"""What Depth-Attention carries from layer to layer, on a stage, between stages and between passes.

It is carried openly: a layer's sources are arguments of the layer, what it makes is a result, and what goes on to the
next stage or pass is a part of the message.  So recomputed layers, pipelines and captured passes return every gradient.

Shapes: n rows of the sequence, s of them on this rank, b micro-batch, g key/value heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaponder.backbone.depth_attention import Entry
from megaponder.config.schema import RunConfig
from megaponder.config.stages import stage_range
from megaponder.decoding import depth_sources
from megaponder.engine.active_rows import Rows
from megaponder.ponder.base import Pass


class EarlierLayers:
    """How this rank carries keys and values of earlier layers; without the feature, nothing."""

    def __init__(self, cfg: RunConfig):
        m, par = cfg.model, cfg.parallel
        assert m.num_layers and m.num_kv_heads and m.head_size and m.hidden_size
        self.feature, self.layers, self._hidden = depth_sources.read(m.depth_attention), m.num_layers, m.hidden_size
        self.shards = par.tensor if par.sequence else 1
        self._heads = (m.num_kv_heads // par.tensor, m.head_size)
        self._ends = [stage_range(cfg, stage).stop for stage in range(par.pipeline)]

    def begin(self, given: Sequence[Tensor], rows: Rows | None) -> Earlier:
        """What came with the message; `rows` are those that this pass computes (None: all)."""
        return Earlier(self, given, rows)

    @property
    def across(self) -> bool:
        """Layers of earlier passes are sources too."""
        return self.feature is not None and self.feature.passes == "across"

    def widths(self, passes: Sequence[Pass]) -> list[list[int]]:
        """Channels that keys and values take in the message after each stage of each pass."""
        if self.feature is None:
            return [[0] * len(self._ends) for _ in passes]
        each = 2 * self.shards * self._heads[0] * self._heads[1]
        counts = depth_sources.crossing(self.feature, self.layers, [p.layers for p in passes], self._ends)
        return [[each * n for n in found[:-1]] + [each * found[-1] * self.across] for found in counts]

    def pack(self, rows: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        """Rows [s, b, ...] of a message with keys and values [n, b, g, d] behind them."""
        folded = [x.unflatten(0, (rows.shape[0], self.shards)).transpose(1, 2).flatten(2) for x in earlier]
        return torch.cat([rows, *folded], dim=-1) if folded else rows

    def unpack(self, message: Tensor, riders: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The inverse, where riders take so many channels."""
        if self.feature is None:
            return message, ()
        rows, rest = message[..., : self._hidden + riders], message[..., self._hidden + riders :]
        each = self.shards * self._heads[0] * self._heads[1]
        found = (x.unflatten(-1, (self.shards, *self._heads)) for x in rest.split(each, dim=-1) if x.shape[-1])
        return rows, tuple(x.transpose(1, 2).flatten(0, 1) for x in found)


class Earlier:
    """Keys and values of earlier layers while a pass runs on a stage."""

    def __init__(self, depth: EarlierLayers, given: Sequence[Tensor], rows: Rows | None):
        self._depth, self._rows = depth, rows
        own = [x.contiguous() if rows is None else rows.gather(x) for x in given]
        self._entries: list[Entry] = list(zip(own[0::2], own[1::2], strict=True))

    def sources(self) -> list[Tensor]:
        """Of the next layer: keys and values in turn."""
        return [x for i in self._picked() for x in self._entries[i]]

    def _picked(self) -> list[int]:
        return [] if self._depth.feature is None else self._depth.feature.of(range(len(self._entries)))

    def add(self, layer: int, made: Sequence[Tensor]) -> None:
        """Layer `layer` has run and made a key and a value for later ones, then its sources once more; without the
        feature, nothing."""
        if self._depth.feature is not None:
            k, w, *passed = made
            for i, entry in zip(self._picked(), zip(passed[0::2], passed[1::2], strict=True), strict=True):
                self._entries[i] = entry
            self._entries = self._depth.feature.after(self._entries, (k, w), layer, self._depth.layers)

    def left(self) -> tuple[Tensor, ...]:
        """For the next stage or pass: of all rows."""
        return tuple(x if self._rows is None else self._rows.scatter(x) for entry in self._entries for x in entry)
