"""Which keys and values a pass reads and writes where a token keeps those of fewer passes than it runs."""

from __future__ import annotations

RULES = ("ring", "anchor")


def entry_of(index: int, budget: int, rule: str = "ring") -> int:
    """The entry of pass `index` where each token has `budget` entries (0: one for each pass).

    ring: passes take turns, i mod budget, so that later ones replace what earlier ones stored; anchor: the first passes
    keep their own, and all others share the last.
    """
    if not budget:
        return index
    return index % budget if rule == "ring" else min(index, budget - 1)
