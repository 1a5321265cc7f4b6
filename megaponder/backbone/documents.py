"""Documents that share a sequence, and who sees whom: a token sees itself and earlier tokens of its own document.

Positions count from the document's first token, so a document computes what it would compute alone.

Under context parallelism a rank holds a part of each sequence and sees the whole, which may be one document.

Shapes: b micro-batch, n tokens of a sequence, s of them on this rank, R = s * slots rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaponder.backbone.freqkv_documents import Blocks
from megaponder.decoding.freqkv_blocks import FreqKV


class Documents:
    """Of one micro-batch in one pass; what layers share is made once.

    `starts_bn`, `edges` and `places_n`: see `data.batch.MicroBatch`; `ranks` hold a part of each sequence.
    """

    def __init__(self, starts_bn: Tensor | None, edges: Tensor | None, places_n: Tensor | None = None, ranks: int = 1):
        self.apart = starts_bn is not None
        """False: each sequence is one document."""
        if starts_bn is None:
            assert places_n is not None
            starts_bn = torch.zeros_like(places_n)[None]
        self.starts_bn, self._edges = starts_bn, edges
        self._places = torch.arange(starts_bn.shape[1], device=starts_bn.device) if places_n is None else places_n
        self._tokens = ranks * starts_bn.shape[1]
        self._visible: dict[tuple[int, int], Tensor] = {}
        self._rows: dict[int, Tensor] = {}
        self._blocks: Blocks | None = None

    @property
    def positions_bn(self) -> Tensor:
        """Position of each token in its document, int64 [b, s], [1, s] if documents are not apart."""
        return self._places - self.starts_bn

    def visible(self, slots: int = 1, window: int = 0) -> Tensor:
        """True where row i may see row j of the whole sequence, with a window only rows of its last `window` tokens:
        bool [b, R, n * slots]."""
        if (slots, window) not in self._visible:
            slot = torch.arange(slots, device=self.starts_bn.device)
            own = (self._places[:, None] * slots + slot).flatten()
            rows = torch.arange(self._tokens * slots, device=self.starts_bn.device)
            first = self.starts_bn.repeat_interleave(slots, dim=1)
            if window:
                first = torch.maximum(first, own // slots - (window - 1))
            self._visible[slots, window] = (rows <= own[:, None]) & (rows // slots >= first[..., None])
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
