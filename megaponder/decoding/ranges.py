"""Legal values of the numbers that decoding reads, for options of a run and arguments of a call alike."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

RANGES: dict[str, tuple[float, float, bool]] = {
    "passes": (1, math.inf, True),
    "threshold": (0, 1, False),
    "exit_below": (0, math.inf, False),
    "kv_budget": (0, math.inf, True),
}
"""By name: the least, the most, and whether it counts something."""


Mistake = tuple[str, Any, str, str]
"""Field, value, rule and advice."""


def broken(value: Any, least: float, most: float = math.inf, whole: bool = False) -> tuple[str, str] | None:
    """(rule, advice) for what is no finite number of this range; None for a legal value."""
    rule = f"it must be at least {least}" if most == math.inf else f"it must lie between {least} and {most}"
    if isinstance(value, bool | str) or not abs(value) < math.inf:
        return f"{rule}, and a finite number", "leave it out"
    if not least <= value <= most:
        return rule, f"use {min(max(value, least), most)}"
    if whole and value % 1:
        return "it must be a whole number", f"use {max(least, round(value))}"
    return None


def unknown(name: str, value: Any, legal: Iterable[str]) -> Mistake | None:
    """What is wrong with a word that is not one of these."""
    words = list(legal)
    if value in words:
        return None
    close = difflib.get_close_matches(str(value), words, 1)
    return name, value, f"it must be {', '.join(words[:-1])} or {words[-1]}", f"use {(close or words)[0]}"


def check(name: str, value: Any) -> None:
    """ValueError for an argument outside its range."""
    if (told := broken(value, *RANGES[name])) is not None:
        refuse((name, value, *told))


def refuse(mistake: Mistake | None) -> None:
    """ValueError for a mistake in the arguments of a call."""
    if mistake is not None:
        name, value, rule, fix = mistake
        raise ValueError(f"{name} = {value!r}: {rule}; {fix}")
