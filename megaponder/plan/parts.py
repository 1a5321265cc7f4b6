"""Which layers run how often: the prelude, the core and the coda of a method that repeats the middle of the stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaponder.config.method_facts import MethodLike, PassLike
from megaponder.config.schema import RunConfig
from megaponder.plan.flops import steps_seen


@dataclass(frozen=True)
class Part:
    """Neighbouring layers that run equally often."""

    name: str
    """prelude, core or coda; stack where all layers run in every pass."""
    first: int
    """Its first layer, from 0."""
    last: int
    """Its last one."""
    runs: int
    """Executions of each of them a token, in evaluation."""
    runs_in_training: float
    """Mean over steps."""
    most_runs: int
    """Of a step."""

    @property
    def executed(self) -> int:
        """Layers that a token executes here, in evaluation."""
        return (self.last + 1 - self.first) * self.runs

    def __str__(self) -> str:
        one = self.first == self.last
        text = f"{self.name}: layer{'' if one else 's'} {self.first}{'' if one else f' to {self.last}'}, "
        text += "once" if self.runs == 1 else f"{self.runs} times"
        if self.runs_in_training == self.most_runs == self.runs:
            return text
        if self.runs_in_training == self.most_runs:
            return f"{text} (in training {self.most_runs})"
        return f"{text} (in training {self.runs_in_training:.3g} in the mean, {self.most_runs} at most)"


def parts(cfg: RunConfig, method: MethodLike) -> tuple[Part, ...]:
    """The parts of the stack in order, those without layers left out."""
    seed, layers = cfg.train.seed, cfg.model.num_layers or 0
    plans = [method.passes(seed, step) for step in steps_seen(cfg, method)]
    begin, end = method.core or (0, layers)
    names = ("prelude", "core", "coda") if method.core else ("", "stack", "")

    def made(name: str, first: int, after: int) -> Part:
        runs = [times(plan, first) for plan in plans]
        evaluated, most = times(method.passes(seed, None), first), times(method.longest(seed), first)
        return Part(name, first, after - 1, evaluated, sum(runs) / len(runs), most)

    places = zip(names, (0, begin, end), (begin, end, layers), strict=True)
    return tuple(made(name, first, after) for name, first, after in places if after > first)


def times(plan: Sequence[PassLike], layer: int) -> int:
    """How many passes of a plan run a layer."""
    return sum(p.layers is None or p.layers[0] <= layer < p.layers[1] for p in plan)
