"""Decoding of a plain language model."""

from __future__ import annotations

from megaponder.decoding.method import DecodingMethod


class Vanilla(DecodingMethod):
    """One pass."""

    name = "vanilla"
