"""What `megaponder eval --depth` found of runs, as means over the runs of a group."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaponder.compare.results import Group, Sweep

Analysis = Mapping[str, Any]
HALF = 0.5


@dataclass(frozen=True)
class Number:
    """A mean over runs and what surrounds it."""

    mean: float
    low: float
    high: float
    """Smallest and largest over runs; of one run, one standard error below and above it, where that is known."""


def number(values: Sequence[float], error: float | None = None) -> Number:
    """Of the values of runs."""
    mean = statistics.fmean(values)
    if len(values) == 1 and error is not None:
        return Number(mean, mean - error, mean + error)
    low, high = min(values), max(values)
    return Number(min(max(mean, low), high), low, high)  # the mean of equal values may be rounded away from them


def analyses(group: Group) -> list[Analysis]:
    """Of the group's runs that were evaluated."""
    return [r.analysis for r in group.results if r.analysis is not None]


def over(group: Group, of: Callable[[Analysis], float | None]) -> Number | None:
    """A number over the runs that have it."""
    values = [v for v in map(of, analyses(group)) if v is not None]
    return number(values) if values else None


def losses(group: Group) -> list[Number]:
    """Loss with all tokens stopping after 1, 2, ... passes."""
    found = analyses(group)
    count = min((len(a["losses"]) for a in found), default=0)
    return [number([a["losses"][k] for a in found]) for k in range(count)]


def by_depth(group: Group) -> dict[int, Number]:
    """`Result.by_depth`, at the depths that all runs have."""
    found = [r.by_depth for r in group.results]
    return {k: number([each[k] for each in found]) for k in found[0] if all(k in each for each in found)}


def benefits(group: Group) -> dict[int, Number]:
    """By number of passes: what the next one takes off the loss."""
    return {k: number([d["benefit"] for d in each], each[0]["standard_error"]) for k, each in _decisions(group).items()}


def _decisions(group: Group) -> dict[int, list[Mapping[str, Any]]]:
    found = analyses(group)
    common = set.intersection(*({d["after"] for d in a["decisions"]} for a in found)) if found else set()
    return {k: [next(d for d in a["decisions"] if d["after"] == k) for a in found] for k in sorted(common)}


@dataclass(frozen=True)
class Choice:
    """How good the score of a decision is: gains in nats per token if half of the tokens go on."""

    after: int
    rank_correlation: Number | None
    score: Number
    random: Number
    hindsight: Number


def choices(group: Group) -> list[Choice]:
    """Of the decisions that have a score."""
    made = []
    for k, each in _decisions(group).items():
        gains = [next((g for g in d.get("gain", ()) if g["share"] == HALF), None) for d in each]
        known = [g for g in gains if g is not None]
        if len(known) != len(gains) or not known:
            continue
        correlations = [d["rank_correlation"] for d in each if d["rank_correlation"] is not None]
        three = (number([g[name] for g in known]) for name in ("score", "random", "hindsight"))
        made.append(Choice(k, number(correlations) if correlations else None, *three))
    return made


def better_than(group: Group, other: str) -> Number | None:
    """Loss with the depths `shuffled` over tokens, or `uniform`, less that of the model's own choice."""
    found = [a["policy"][other] for a in analyses(group) if other in a.get("policy", {})]
    if not found:
        return None
    return number([p["minus_policy"] for p in found], found[0]["standard_error"])


def classes(group: Group, by: str, value: str) -> dict[str, Number]:
    """`depth`, `loss` or `benefit` (of all passes beyond the first) of each class of tokens that all runs have."""
    tables = [{c["class"]: c for c in a["classes"] if c["by"] == by} for a in analyses(group)]
    if not tables:
        return {}
    names = [name for name in tables[0] if all(name in t for t in tables)]
    values = {n: [c["losses"][0] - c["losses"][-1] if value == "benefit" else c[value] for c in (t[n] for t in tables)]
              for n in names}  # fmt: skip
    return {name: number(each) for name, each in values.items() if None not in each}


def sweeps(group: Group) -> list[Sweep]:
    """Points of the runs' sweeps: means over runs, where these have the same points."""
    runs = [r.sweep for r in group.results if r.sweep]
    if not runs:
        return []
    if any([s.kind for s in run] != [s.kind for s in runs[0]] for run in runs):
        return list(runs[0])
    points = zip(*runs, strict=True)
    return [
        Sweep(p[0].variant, p[0].kind, statistics.fmean(s.flops for s in p), statistics.fmean(s.loss for s in p))
        for p in points
    ]


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (FLOPs, loss) that no other one beats or equals in both, by FLOPs."""
    kept: list[tuple[float, float]] = []
    for flops, loss in sorted(set(points)):
        if not kept or loss < kept[-1][1]:
            kept.append((flops, loss))
    return kept
