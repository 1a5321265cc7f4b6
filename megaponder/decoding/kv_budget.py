"""Which keys and values a pass reads and writes where a token keeps those of fewer passes than it runs."""

from __future__ import annotations

from megaponder.decoding.ranges import Mistake

RULES = ("ring", "anchor")


def entry_of(index: int, budget: int, rule: str = "ring") -> int:
    """The entry of pass `index` where each token has `budget` entries (0: one for each pass).

    ring: passes take turns, i mod budget, so that later ones replace what earlier ones stored; anchor: the first passes
    keep their own, and all others share the last.
    """
    if not budget:
        return index
    return index % budget if rule == "ring" else min(index, budget - 1)


def budget_mistake(budget: int, passes: int, rule: str = RULES[0]) -> Mistake | None:
    """What is wrong with a budget of a token that runs so many passes."""
    if budget > passes:
        return "kv_budget", budget, f"a token runs {passes} passes, so it would keep those of all", "use 0"
    if rule != RULES[0] and not budget:
        return "kv_rule", rule, "all keys and values are kept while kv_budget is 0", "give kv_budget, too"
    return None
