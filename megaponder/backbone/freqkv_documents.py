"""Where the blocks of FreqKV lie when a sequence holds several documents, each of which begins anew.

Every shape follows from the length of the sequence, never from the documents: a captured pass must not depend on them.
Blocks that do not exist, and rows of a block after its document's end, stand for any rows; none that exists sees them.

Shapes: n rows of a sequence, b micro-batch; C capacity, F memory, D hop, B most blocks of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaponder.backbone.row_kernels import gather_rows, only
from megaponder.decoding.freqkv import slots
from megaponder.decoding.freqkv_blocks import FreqKV


class Blocks:
    """The blocks of all documents, in their order; `starts_bn` [b, n]: the first row of each row's document."""

    def __init__(self, feature: FreqKV, starts_bn: Tensor):
        self._feature, self._starts = feature, starts_bn.t().contiguous()
        n, b = self._starts.shape
        memory, hop, device = feature.memory, feature.hop, starts_bn.device
        row = torch.arange(n, device=device)[:, None].expand(n, b)
        position = row - self._starts
        self.slots = slots(feature, position)
        self._head = position < memory
        begins = ~self._head & ((position - memory) % hop == 0)
        number = begins.cumsum(0)  # blocks that began so far
        most = n // min(hop, memory + 1)
        # the row where each block begins; one place more for rows that begin none
        begin = torch.zeros(most + 1, b, dtype=torch.long, device=device)
        begin = begin.scatter(0, torch.where(begins, number - 1, most), row)[:most]
        self.first = position.gather(0, begin) == memory
        window = torch.arange(-memory, hop, device=device)[:, None]
        self._rows = (begin[:, None] + window).clamp(0, n - 1)  # [B, C, b]
        place = (number - 1) * hop + (position - memory) % hop
        self._own_place = torch.where(self._head, most * hop, place)
        rows = self._rows[:, memory:].flatten(0, 1)
        exists = self._own_place.gather(0, rows) == torch.arange(len(rows), device=device)[:, None]
        self._own_row = torch.where(exists, rows, n)
        # rows of the first memory of a document belong to the next block, if that is the document's
        following = number.clamp(max=most - 1)
        there = (number < most) & (begin.gather(0, following) == self._starts + memory)
        in_memory = torch.where(there, following * feature.capacity + position, most * feature.capacity)
        in_block = (number - 1) * feature.capacity + memory + (position - memory) % hop
        self._place = torch.where(self._head, in_memory, in_block)

    def gather(self, x: Tensor) -> Tensor:
        """Of each block the F rows before it, which count in the first of a document, and its own: [B, C, b, ...]."""
        out = gather_rows(x, self._rows.flatten(0, 1), self._place)
        return out.unflatten(0, (-1, self._feature.capacity))

    def gather_own(self, x: Tensor) -> Tensor:
        """The rows of each block [B, D, b, ...]."""
        rows = self._rows[:, self._feature.memory :]
        return gather_rows(x, rows.flatten(0, 1), self._own_place).unflatten(0, (-1, self._feature.hop))

    def scatter(self, blocks: Tensor, heads: Tensor) -> Tensor:
        """[n, b, ...]: `blocks` [B, D, b, ...] where rows belong to one, `heads` [n, b, ...] elsewhere."""
        blocks = blocks.flatten(0, 1)
        found = gather_rows(blocks, self._own_place.clamp(max=len(blocks) - 1), self._own_row)
        out: Tensor = only(self._head, heads, found)
        return out

    def seen_in_tiles(self, tile: int) -> Tensor:
        """True where row i of a tile may see row j of the tile before it and its own: [b, tiles, tile, 2 tile]."""
        n = len(self._starts)
        tiles = -(-n // tile)
        row = torch.arange(tiles * tile, device=self._starts.device)
        first = torch.nn.functional.pad(self._starts.t(), (0, len(row) - n)).unflatten(1, (tiles, tile))
        query = row.view(tiles, tile, 1)
        key = query[:, :1] + torch.arange(-tile, tile, device=row.device)
        return (key <= query) & (key >= first[..., None])
