"""Which tokens FreqKV keeps as they are and when it compresses the others; no tensors, so that rules and plans can ask.

A text of more than `capacity` tokens is its first `memory` tokens and then blocks of `hop` tokens.  A block attends to
itself and to a memory of `memory` rows: the first `sink` tokens, and all tokens from there to the block, compressed.
So nothing attends to more than `capacity` keys, and positions stay below `capacity`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

BY_MATRIX = 1024
"""Up to so many rows are transformed by a product with a constant matrix, more by two FFTs."""


@dataclass(frozen=True)
class FreqKV:
    """The feature `freqkv` with its defaults filled in."""

    capacity: int
    """C: rows of keys and values, for which the model's positions suffice."""
    sink: int = 4
    """s: first tokens of a text, which are never compressed."""
    ratio: float = 0.5
    """Share of the C - s other rows that is left when they are compressed."""

    @property
    def span(self) -> int:
        """N = C - s: rows that are compressed at once."""
        return self.capacity - self.sink

    @property
    def kept(self) -> int:
        """L: what is left of them."""
        return int(self.ratio * self.span)

    @property
    def hop(self) -> int:
        """D = N - L: tokens of a block."""
        return self.span - self.kept

    @property
    def memory(self) -> int:
        """F = s + L: rows before a block's own."""
        return self.sink + self.kept

    def blocks(self, tokens: int) -> int:
        """Blocks of a text, the last of which may not be full."""
        return max(0, -(-(tokens - self.memory) // self.hop))

    def events(self, tokens: int) -> int:
        """How often a text of so many tokens is compressed."""
        return max(0, self.blocks(tokens) - 1)


OPTIONS = tuple(f.name for f in fields(FreqKV))


def read(given: dict[str, Any] | None) -> FreqKV | None:
    """The feature's value; None where it is off ({}).  ValueError for names that it does not have."""
    if not given:
        return None
    if unknown := given.keys() - set(OPTIONS):
        raise ValueError(f"freqkv has no {sorted(unknown)}")
    return FreqKV(**given)
