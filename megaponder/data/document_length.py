"""How long documents are within the samples that they are cut into, from a dataset's lengths alone; no torch."""

from __future__ import annotations

import numpy as np

from megaponder.data.indexed import Index

SEEN = 1 << 20
"""Documents that are looked at, from the first on."""


def document_tokens(index: Index, length: int) -> float:
    """Tokens of the document that a token lies in, as far as its sample of `length` tokens holds it; mean over tokens.

    The documents are taken in the order in which they are stored; one that ends in the dataset's lengths without an
    end-of-document token counts as one, too.
    """
    if index.mask is not None:  # conversations, none of which is divided
        own = np.minimum(index.lengths[:SEEN], length).astype(np.int64)
        return float(np.square(own).sum() / own.sum())
    ends = np.cumsum(index.lengths[:SEEN], dtype=np.int64)
    parts = np.diff(np.union1d(ends, np.append(np.arange(0, ends[-1], length), ends[-1])))
    return float(np.square(parts).sum() / parts.sum())
