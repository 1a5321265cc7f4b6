"""Decoding of a plain language model."""

from __future__ import annotations

from megaponder.decoding.steps import Stepwise


class Vanilla(Stepwise):
    """One pass."""

    name = "vanilla"
