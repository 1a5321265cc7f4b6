"""Decoding of a plain language model."""

from __future__ import annotations

from typing import Any

from megaponder.decoding.steps import Stepwise


class Vanilla(Stepwise):
    """One pass."""

    name = "vanilla"

    @classmethod
    def repeats(cls, options: dict[str, Any]) -> int:
        return 1
