"""The criteria of Huginn's exit, for options and decoding alike."""

from __future__ import annotations

from megaponder.decoding.ranges import Mistake

EXITS = {"change": 0.03, "cosine": 1e-3, "entropy": 1e-3, "divergence": 1e-3, "min_p": 1e-5, "likeliest": 5}
"""With the published value of `exit_below`."""


def exit_mistake(by: str, below: float, told: bool) -> Mistake | None:
    """Where the two do not fit; `told`: the criterion is given, not a default."""
    if told and not below:
        fix = f"give exit_below, too, for example {EXITS[by]:g}"
        return "exit_by", by, "nothing stops while exit_below is 0", fix
    if by == "likeliest" and below % 1:
        rule = "with exit_by = likeliest it counts recurrences, so it must be a whole number"
        return "exit_below", below, rule, f"use {max(1, round(below))}"
    return None
