"""Kinds of tokens, by their text (word start, continuation, digits, punctuation, ...) and by how common they are."""

from __future__ import annotations

import numpy as np

from megaponder.data.tokenizer import Tokenizer

CLASSES = ("word start", "continuation", "digits", "punctuation", "whitespace", "part of a character", "special")
"""By text.  A token with letters starts a word unless it directly follows a letter."""
START, CONTINUATION, DIGITS, PUNCTUATION, SPACE, PART, SPECIAL = range(len(CLASSES))
BANDS = (10, 100, 1_000, 10_000)
"""Last ranks of the frequency bands; the rest is a band, too."""


class TextClasses:
    """Classes of the tokens of a text under a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        special = set(tokenizer.special_tokens.values())
        texts = _texts(tokenizer)
        self._kinds = np.array([SPECIAL if i in special else _kind(text) for i, text in enumerate(texts)], np.int8)
        self._open = np.array([text[-1:].isalpha() for text in texts])
        self._letter_first = np.array([text[:1].isalpha() for text in texts])

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Indices into `CLASSES` of token ids [windows, n]; the first token of a window follows nothing."""
        safe = np.minimum(ids, len(self._kinds) - 1)
        out = np.where(ids < len(self._kinds), self._kinds[safe], SPECIAL)
        follows = np.zeros(ids.shape, bool)
        follows[:, 1:] = self._open[safe[:, :-1]]
        out[(out == START) & self._letter_first[safe] & follows] = CONTINUATION
        return out


def _texts(tokenizer: Tokenizer) -> list[str]:
    """Each token's text as it stands behind a letter: alone, some tokenizers drop the space before a word."""
    [before] = tokenizer.encode_batch(["a"])
    known = len(tokenizer.decode(before))
    return [tokenizer.decode([*before, i])[known:] for i in range(tokenizer.vocab_size)]


def _kind(text: str) -> int:
    if "\ufffd" in text or not text:
        return PART
    if text.isspace():
        return SPACE
    if any(c.isalpha() for c in text):
        return START
    return DIGITS if any(c.isdigit() for c in text) else PUNCTUATION


def bands(counts: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Frequency band of every token id, from its number of occurrences, and the bands' names: the first holds the most
    common tokens."""
    rank = np.empty(len(counts), np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(1, len(counts) + 1)
    first = (1, *(last + 1 for last in BANDS))
    names = [f"rank {a:,} to {b:,}" for a, b in zip(first, BANDS, strict=False)] + [f"rank above {BANDS[-1]:,}"]
    return np.searchsorted(BANDS, rank), names
