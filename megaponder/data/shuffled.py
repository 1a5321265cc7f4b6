"""The order of data: its randomness, and how much an epoch holds; no torch."""

from __future__ import annotations

import numpy as np


def generator(seed: int, epoch: int, use: int) -> np.random.RandomState:
    """Independent stream per (seed, epoch, use); RandomState's algorithms are frozen, those of Generator are not."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch, use])))


def samples_in(epochs: int, tokens: int, sequence_length: int) -> int:
    """Samples of sequence_length (+ 1 label) tokens that lie wholly in `epochs` epochs of `tokens` tokens."""
    return max(0, epochs * tokens - 1) // sequence_length
