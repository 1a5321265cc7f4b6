"""Vanilla: a plain language model, one pass, one slot."""

from __future__ import annotations

from megaponder.ponder.base import Method, register


@register
class Vanilla(Method):
    """logits = N(Stack(We[ids])) Wo^T."""

    name = "vanilla"
    summary = "plain language model: one pass"
