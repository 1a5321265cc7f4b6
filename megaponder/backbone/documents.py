"""Documents that share a sequence, and who sees whom: a token sees itself and earlier tokens of its own document.

Positions count from the document's first token, so a document computes what it would compute alone.

Shapes: b micro-batch, n tokens of a sequence, R = n * slots rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaponder.backbone.freqkv_documents import Blocks
from megaponder.decoding.freqkv_blocks import FreqKV


class Documents:
    """Of one micro-batch in one pass; what layers share is made once.

    `starts_bn` and `edges`: see `data.batch.MicroBatch`.
    """

    def __init__(self, starts_bn: Tensor, edges: Tensor | None):
        self.starts_bn, self._edges = starts_bn, edges
        self._visible: dict[tuple[int, int], Tensor] = {}
        self._rows: dict[int, Tensor] = {}
        self._blocks: Blocks | None = None

    @property
    def positions_bn(self) -> Tensor:
        """Position of each token in its document, int64 [b, n]."""
        return torch.arange(self.starts_bn.shape[1], device=self.starts_bn.device) - self.starts_bn

    def visible(self, slots: int = 1, window: int = 0) -> Tensor:
        """True where row i may see row j, with a window only rows of its last `window` tokens: bool [b, R, R]."""
        if (slots, window) not in self._visible:
            rows = torch.arange(self.starts_bn.shape[1] * slots, device=self.starts_bn.device)
            token, first = rows // slots, self.starts_bn.repeat_interleave(slots, dim=1)
            if window:
                first = torch.maximum(first, token - (window - 1))
            self._visible[slots, window] = (rows <= rows[:, None]) & (token >= first[..., None])
        return self._visible[slots, window]

    def blocks(self, feature: FreqKV) -> Blocks:
        """Where the blocks of FreqKV lie."""
        if self._blocks is None:
            self._blocks = Blocks(feature, self.starts_bn)
        return self._blocks

    def edges(self, slots: int = 1) -> Tensor:
        """Where documents begin among the rows of all sequences, joined, and their end: int32 [E + 1]."""
        assert self._edges is not None
        if slots not in self._rows:
            self._rows[slots] = self._edges * slots
        return self._rows[slots]
