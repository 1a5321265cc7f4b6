"""A number of repetitions that changes from training step to step: drawn at random, capped, grown by a curriculum.

    m(step) = S, or while the number grows ceil(S f(step / grow_steps)), at least 1:  f(x) = x, or 1 - sqrt(1 - x)

    draw: fixed      n = m
    draw: uniform    n ~ U{draw_from .. draw_to},  the upper end growing like m
    draw: poisson    n ~ Poisson(m)
    draw: lognormal  n ~ 1 + Poisson(e^tau),  tau ~ Normal(log m - 1/8, 1/2)     (Huginn's; its mean is m + 1)

and draw_from <= n <= draw_to in the end.  S is the method's own number, with which it is evaluated and decoded.

A number is a pure function of (seed, step): one draw a step for all micro-batches and ranks, the same in every layout
and after a resume.  (Huginn's code draws for every micro-batch: the same distribution, more numbers a step.)
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from megaponder.errors import ConfigError
from megaponder.ponder.base import MOST_PASSES, pass_count
from megaponder.ponder.halting import at_least, one_of

DRAWS = ("fixed", "uniform", "poisson", "lognormal")
GROWTHS = ("linear", "root")


@dataclass
class DrawnOptions:
    """Options of a method whose number of repetitions may change from step to step."""

    draw: str = "fixed"
    """How training finds the number of repetitions of a step: fixed, uniform (from draw_from to draw_to), poisson, or
    lognormal (Huginn's: one more than Poisson around a log-normal mean)."""
    draw_from: int = pass_count(1)
    """Fewest repetitions that are drawn; at most the number used in evaluation."""
    draw_to: int = pass_count(0)
    """Most repetitions that are drawn, which memory must hold, at least the number used in evaluation; 0: what makes a
    uniform draw's mean that number, and four times it for the others."""
    grow_steps: int = 0
    """Training steps over which the number grows from 1; 0: it does not grow."""
    grow: str = "linear"
    """How it grows: linear, or root, which is slow at first: 1 - sqrt(1 - x)."""

    def check_draw(self, s: int) -> None:
        """ConfigError for options that do not fit together; `s`: the number in evaluation."""
        one_of(self, "draw", DRAWS)
        one_of(self, "grow", GROWTHS)
        at_least(self, "draw_from", 1)
        at_least(self, "grow_steps", 0)
        if self.draw == "fixed":
            if self.draw_to:
                rule = "draw = fixed draws no number"
                raise ConfigError("ponder.options.draw_to", self.draw_to, rule, "use 0, or draw: uniform")
            return
        if not self.draw_from <= self.most(s):
            told, fix = (self.draw_to, self.draw_from) if self.draw_to else (0, max(self.draw_from, 2 * s))
            rule = f"it must be at least draw_from = {self.draw_from}"
            raise ConfigError("ponder.options.draw_to", told, rule, f"use {fix}")

    def check_drawn(self, number: str) -> None:
        """ConfigError for options without effect, or that never draw what is evaluated; `number`: the option S."""
        s, field = getattr(self, number), "ponder.options."
        if self.draw == "fixed" and self.draw_from != 1:
            rule, fix = "draw = fixed draws no number", "use 1, or draw: uniform"
            raise ConfigError(f"{field}draw_from", self.draw_from, rule, fix)
        if not self.grow_steps and self.grow != GROWTHS[0]:
            rule, fix = "with grow_steps = 0 the number does not grow", f"use {GROWTHS[0]}, or set grow_steps"
            raise ConfigError(f"{field}grow", self.grow, rule, fix)
        reaches(self.draw_to, number, s)
        if self.draw != "fixed" and self.draw_from > s:
            rule = f"it must be at most {number} = {s}, with which the model is evaluated"
            raise ConfigError(f"{field}draw_from", self.draw_from, rule, f"the nearest is {s}")

    def most(self, s: int) -> int:
        """The largest number of a step."""
        if self.draw == "fixed":
            return s
        return self.draw_to or min(MOST_PASSES, 2 * s - self.draw_from if self.draw == "uniform" else 4 * s)

    def number(self, s: int, seed: int, step: int | None) -> int:
        """Repetitions of a training step; `s` in evaluation (step None)."""
        if step is None:
            return s
        share = 1.0 if step >= self.grow_steps else step / self.grow_steps
        if self.grow == "root":
            share = 1.0 - math.sqrt(1.0 - share)
        mean, most = max(1, math.ceil(s * share)), self.most(s)
        if self.draw == "fixed":
            return mean
        source = random.Random(f"depth/{seed}/{step}")
        if self.draw == "uniform":
            return source.randint(self.draw_from, max(self.draw_from, math.ceil(most * share)))
        if self.draw == "poisson":
            found = poisson(mean, source.random())
        else:
            tau = NormalDist(math.log(mean) - 0.125, 0.5).inv_cdf(source.random() or 0.5)
            found = 1 + poisson(math.exp(tau), source.random())
        return min(max(found, self.draw_from), most)


def reaches(draw_to: int, number: str, s: int) -> None:
    """ConfigError where training never draws the number S with which the model is evaluated, and around which it
    draws."""
    if 0 < draw_to < s:
        rule = f"it must be at least {number} = {s}, with which the model is evaluated, or 0"
        raise ConfigError("ponder.options.draw_to", draw_to, rule, f"the nearest is {s}")


def poisson(mean: float, u: float) -> int:
    """The Poisson number whose distribution function first exceeds u, for means up to some 700."""
    k, chance = 0, math.exp(-mean)
    total = chance
    while total <= u and k < mean + 40 * math.sqrt(mean + 1):
        k += 1
        chance *= mean / k
        total += chance
    return k
