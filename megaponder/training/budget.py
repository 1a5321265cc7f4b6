"""Warnings about what a method spends: a sentence each, or None."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import fields

from megaponder.config.declare import declaration
from megaponder.engine import depth
from megaponder.ponder.base import Method
from megaponder.ponder.budget import PRICE
from megaponder.training.evaluate import Evaluation

OVER = 200
"""Steps whose mean is compared with the budget."""
OFF = 0.1
"""Passes by which that mean may differ."""
HALTS = 0.05
"""Share of tokens that must halt before the last pass for it to matter at which gate."""
ONE = 0.95
"""Share of the halting tokens from which on one gate counts as all of it."""


class Budget:
    """Looks at the rows of a run with a method that halts."""

    def __init__(self, method: Method, every: int):
        self._method = method
        rows = max(1, OVER // max(1, every))
        self._spent: deque[tuple[float, float]] = deque(maxlen=rows)
        self._prices: deque[float] = deque(maxlen=rows)

    def decides(self, step: int) -> bool:
        """Whether some tokens are to halt: not before the end of a target's ramp, nor where the target is 1."""
        window = self._method.window
        return window is None or (step >= self._method.options.ramp_end and window.mean < window.most)

    def warnings(self, step: int, stats: Mapping[str, float]) -> dict[str, str | None]:
        """By subject; `stats` as `engine.depth.metrics` gives them."""
        budget, spent = self._method.budget(step), stats.get("wanted_depth", stats.get("mean_depth"))
        if budget is None or spent is None:
            return {}
        self._spent.append((spent, budget))
        if PRICE in stats and self.decides(step):  # before, the threshold lies below all scores
            self._prices.append(stats[PRICE])
        if len(self._spent) < (self._spent.maxlen or 1):
            return {}
        return {"budget": self._off(), "one gate": self._one_gate(stats), "price": self._price()}

    def _off(self) -> str | None:
        spent, budget = (sum(x) / len(self._spent) for x in zip(*self._spent, strict=True))
        if abs(spent - budget) <= OFF:
            return None
        how = "" if self._method.window is not None else "; ponder.options.target would hold it"
        return f"Over the last {OVER} steps a token ran {spent:.2f} passes on average; the budget is {budget:.2f}{how}."

    def _one_gate(self, stats: Mapping[str, float]) -> str | None:
        active = depth.active_shares(stats)
        halted = [a - b for a, b in itertools.pairwise(active)]
        gates = len(halted) if self._method.window is None else self._method.window.gates
        if gates < 2 or sum(halted) < HALTS or max(halted) < ONE * sum(halted):
            return None
        share, gate = max(halted) / sum(halted), halted.index(max(halted))
        return f"One gate does all the halting: of the tokens that halt early, {share:.0%} halt after pass {gate}."

    def _price(self) -> str | None:
        if len(self._prices) < (self._prices.maxlen or 1) or (price := sum(self._prices) / len(self._prices)) >= 0:
            return None
        return (
            f"The price of a pass is negative ({price:.4f} nats): the last passes that the budget pays for increase "
            "the loss; use a smaller ponder.options.target."
        )


def ends_before_the_ramp(method: Method, total: int) -> str | None:
    """A sentence where the run's last step comes before the end of the method's ramp, or of its growth: legal, since
    the run may go on with more steps."""
    ends = {"ramp_end": "before its budget is in force", "grow_steps": "before it runs all its passes"}
    for name, what in ends.items():
        if (end := getattr(method.options, name, 0)) > total:
            return f"ponder.options.{name} is {end:,}, but the run ends at step {total:,}, {what}."
    return None


def without_effect(method: Method) -> str | None:
    """A sentence where options are set that only the form without a budget reads; `parse_options` refuses them where
    the budget is the default, since its user may have meant the other form."""
    ignored: dict[str, list[str]] = {}
    for field in fields(method.options):
        other, value = declaration(field).unless, getattr(method.options, field.name)
        if other and getattr(method.options, other) and value != field.default:
            ignored.setdefault(other, []).append(f"{field.name} = {value}")
    for other, names in ignored.items():
        return (
            f"ponder.options.{other} = {getattr(method.options, other)} leaves {', '.join(names)} without effect; "
            f"{other}: 0.0 is the form that reads {'it' if len(names) == 1 else 'them'}."
        )
    return None


def random_is_as_good(valid: Evaluation) -> str | None:
    """A sentence where who gets the passes makes no difference to the held-out loss."""
    at_random = valid.stats.get("loss_at_random")
    if at_random is None or valid.loss is None or valid.loss < at_random:
        return None
    return (
        f"It makes no difference which tokens get the passes: the held-out loss is {valid.loss:.4f}, and "
        f"{at_random:.4f} when as many passes go to tokens at random."
    )
