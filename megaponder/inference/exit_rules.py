"""By what a model stops early, and the thresholds to try, from the one that never stops too early downwards.

    gate          adaponderlm, adaptive_cot, ponderlm3: a token goes on while its gate is at least `threshold`
    score         the same with a budget: while its score is at least the threshold that lies beside the gates' weights
    confidence    ponderlm (as confident_ponderlm): once the likeliest next token has the probability `threshold`
    exit mass     ouro: once the sum of its exit distribution reaches `threshold`
    change, ...   huginn, retrofit, parcae: once a recurrence changes less than `exit_below` (`huginn/exits.py`)

Grids are fixed: nothing in them depends on the texts that a threshold is tested on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError
from megaponder.inference import variants
from megaponder.ponder.budget import CORRECTION, MEAN, THETA, VARIANCE
from megaponder.ponder.methods.huginn.exits import EXITS
from megaponder.ponder.settings import method_of

STATE = "budget.state"
"""Among a decoding model's `method` modules: a budget's threshold and what it follows."""
GATES = (1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75,
         0.8, 0.85, 0.9, 0.95)  # fmt: skip
SURE = (0.9999, 0.999, 0.995, 0.99, 0.98, 0.97, 0.96, 0.95, 0.925, 0.9, 0.875, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55,
        0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)  # fmt: skip
SMALL = (*(m * 10.0**e for e in range(-4, 0) for m in (1.0, 2.0, 5.0)), 1.0, 2.0)
SHARES = (0.99, 0.98, 0.95, *(1 - i / 20 for i in range(2, 20)))
"""Of a decision's tokens that would go on if scores were normal."""


@dataclass(frozen=True)
class ExitRule:
    """Where a model's threshold lies, and its values."""

    by: str
    option: str
    """Of the method; empty: the threshold of a budget, which is a tensor."""
    full: float
    """The value with which every token runs all passes."""
    grid: tuple[float, ...]
    """The safest first."""
    sequential: bool = False
    """What a token does depends on which tokens run beside it: texts are then decoded one token after the other."""
    more: tuple[tuple[str, Any], ...] = ()
    """Other options that the rule sets."""

    def options(self, value: float) -> dict[str, Any]:
        """The method's options with this threshold; none where it is a tensor."""
        return {self.option: type(self.full)(value), **dict(self.more)} if self.option else {}

    def set(self, model: Any, value: float) -> float:
        """Give a decoding model this threshold; returns it as the model holds it."""
        if self.option:
            model.ponder.options |= self.options(value)
            return float(value)
        state: Tensor = model.method.get_parameter(STATE).data
        state[THETA] = value
        return float(state[THETA])


def as_exiting(cfg: RunConfig) -> RunConfig:
    """The configuration of the model that exits: of a ponderlm, that of confident_ponderlm."""
    if cfg.ponder.method == "ponderlm" and variants.has_threshold(cfg):
        return variants.with_threshold(cfg, 1.0)
    return cfg


def rule_of(
    cfg: RunConfig, model: Any, by: str | None, grid: Sequence[float] | None = None, stored: torch.dtype = torch.float32
) -> ExitRule:
    """The rule of a model (`as_exiting`), with the default grid or another; a budget's threshold is one that its
    `stored` format holds.

    ConfigError for a method whose tokens never stop early, and for a `by` that it does not have.
    """
    rule = _rule(cfg, model, by)
    if grid is None:
        grid = rule.grid
    if not rule.option:
        grid = torch.tensor(grid).to(stored).tolist()
    ordered = sorted(grid, reverse=rule.full > 0) if rule.by != "likeliest" else sorted(grid, reverse=True)
    return ExitRule(rule.by, rule.option, rule.full, tuple(ordered), rule.sequential, rule.more)


def _rule(cfg: RunConfig, model: Any, by: str | None) -> ExitRule:
    method, options = cfg.ponder.method, model.ponder.options
    bounded = bool(options.get("kv_budget"))
    if "exit_below" in options:
        if by is not None and by not in EXITS:
            raise ConfigError("--by", by, f"{method} stops by one of {', '.join(EXITS)}", "use change")
        name = by or str(options["exit_by"])
        grid = SMALL if name != "likeliest" else tuple(float(i) for i in range(int(options["recurrence"]) - 1, 0, -1))
        return ExitRule(name, "exit_below", 0.0, grid, True, (("exit_by", name),))
    if method_of(cfg).window is not None:
        _only(by, "score" if method != "confident_ponderlm" else "confidence", method)
        state = model.method.get_parameter(STATE).data.float().tolist()
        spread = max(state[VARIANCE], 0.0) ** 0.5
        grid = tuple(state[MEAN] + spread * (NormalDist().inv_cdf(1 - p) + state[CORRECTION]) for p in SHARES)
        return ExitRule("score" if method != "confident_ponderlm" else "confidence", "", -(2.0**20), grid, bounded)
    if "threshold" not in options or options.get("router") == "none":
        rule = f"tokens of method {method} have no rule by which they stop early"
        raise ConfigError("--by", by, rule, "use ponderlm, a method with gates, or a looped model")
    if method in ("confident_ponderlm", "ouro"):
        name = "confidence" if method == "confident_ponderlm" else "exit mass"
        _only(by, name, method)
        return ExitRule(name, "threshold", 1.0, SURE, bounded)
    _only(by, "gate", method)
    return ExitRule("gate", "threshold", 0.0, GATES, bounded)


def _only(by: str | None, name: str, method: str) -> None:
    if by not in (None, name):
        raise ConfigError("--by", by, f"{method} stops by {name}", f"use {name}, or leave it out")
