"""Rules on ESLM: what its options may be, and which methods' losses it may weigh."""

from __future__ import annotations

from typing import Any

from megaponder.config.eslm import OPTIONS, SCOPES, SCORES
from megaponder.config.rules.case import Case, Rule, require, require_option

FIELD = "train.eslm"


def eslm_is_whole(c: Case) -> None:
    """Each option is known and legal, and the score is named."""
    given = c.cfg.train.eslm or {}
    for name, value in given.items():
        require_option(FIELD, name, value, OPTIONS)
    if not given:
        return
    require("by" in given, FIELD, given, "it needs by, the score of a token: loss or entropy", "add by: loss")
    for name, known in (("by", SCORES), ("scope", SCOPES)):
        value = given.get(name, known[0])
        require(value in known, f"{FIELD}.{name}", value, f"it must be {' or '.join(known)}", f"use {known[0]}")
    alpha = given.get("alpha", 0.1)
    rule = "it must be at least 0 and less than 1: the share of tokens that is left out"
    require(_number(alpha) and 0 <= alpha < 1, f"{FIELD}.alpha", alpha, rule, "use 0.1")
    warmup = given.get("warmup", 0)
    rule = "it must be a whole number of steps of at least 0"
    require(type(warmup) is int and warmup >= 0, f"{FIELD}.warmup", warmup, rule, "use 0")
    adapt = given.get("adapt", 0.0)
    rule = "it must be a number of at least 0 and at most 10"
    require(_number(adapt) and 0 <= adapt <= 10, f"{FIELD}.adapt", adapt, rule, "use 0 for a constant alpha, or 0.5")
    _range_is_legal(given.get("alpha_range"), alpha, adapt)


def _range_is_legal(ends: Any, alpha: float, adapt: float) -> None:
    if ends is None:
        rule = "alpha would leave alpha_range, which is [0, 0.5]"
        require(not adapt or alpha <= 0.5, f"{FIELD}.alpha", alpha, rule, "use at most 0.5, or give alpha_range")
        return
    rule = "it must be two numbers from 0 to below 1, the smaller first, with alpha between them"
    ok = isinstance(ends, list | tuple) and len(ends) == 2 and all(map(_number, ends))
    ok = ok and 0 <= ends[0] <= alpha <= ends[1] < 1
    require(ok, f"{FIELD}.alpha_range", ends, rule, f"use [0.0, {max(0.5, alpha)}]")
    rule = "alpha does not move, since adapt is 0"
    require(adapt > 0, f"{FIELD}.alpha_range", ends, rule, "take it out, or set adapt: 0.5")


def eslm_fits_method(c: Case) -> None:
    """Who stops when must not depend on which tokens are selected."""
    method = c.cfg.ponder.method
    rule = f"the losses of {method} also train its gates, which then would know the selected tokens only"
    require(not c.cfg.train.eslm or not c.facts.trains_exits, FIELD, c.cfg.train.eslm, rule, "use {}")


def _number(value: Any) -> bool:
    return type(value) in (int, float)


RULES: tuple[Rule, ...] = (eslm_is_whole, eslm_fits_method)
