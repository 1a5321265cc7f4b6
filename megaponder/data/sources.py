"""A dataset of a blend: its open files, and what they determine for a run."""

from __future__ import annotations

from dataclasses import dataclass

from megaponder.data.indexed import Index
from megaponder.data.info import DatasetMeta


@dataclass(frozen=True)
class SourceFacts:
    """One source of a blend."""

    path: str
    """Prefix of the dataset."""
    weight: float
    """Share of the sequences; all shares of a blend sum to 1."""
    documents: int
    """Sequences of the dataset that this blend may use."""
    tokens: int
    """Their tokens: one epoch."""
    conversations: bool
    """They are conversations, not texts."""


@dataclass(frozen=True)
class Opened:
    """A dataset whose files are open: what is read is what was checked, whatever happens to its path."""

    index: Index
    meta: DatasetMeta | None
