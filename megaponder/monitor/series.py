"""A run's rows as curves and facts, for `megaponder watch`; reads metrics.jsonl and nothing else."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaponder.monitor import jsonl
from megaponder.monitor.console import duration
from megaponder.monitor.phases import STEP
from megaponder.monitor.registry import amount

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """Curves that share their axes; x is the step."""

    title: str
    curves: dict[str, Points]

    @property
    def filled(self) -> bool:
        """Whether there is anything to draw."""
        return any(self.curves.values())


@dataclass(frozen=True)
class Overview:
    """Everything a board shows about a run."""

    run: str
    step: int
    total: int | None
    age: float
    """Seconds since metrics.jsonl was last written."""
    facts: dict[str, str]
    """In words, in the order in which they are shown."""
    panels: tuple[Panel, ...]

    @property
    def finished(self) -> bool:
        """Whether the last row is that of the last step."""
        return self.total is not None and self.step >= self.total


def overview(run: Path, now: float | None = None) -> Overview:
    """The overview from the rows; UserError for a folder without rows."""
    series = jsonl.of_run(run)
    rows = series.rows
    age = max(0.0, (time.time() if now is None else now) - (run / jsonl.NAME).stat().st_mtime)
    total = _last(rows, "total_steps")
    step = int(rows[-1]["step"])
    return Overview(
        run=run.resolve().name,
        step=step,
        total=None if total is None else int(total),
        age=age,
        facts=_facts(rows, step, total, age) | ({"left out": said} if (said := " ".join(series.sentences())) else {}),
        panels=_panels(rows),
    )


def averaged(points: Points, most: int) -> Points:
    """At most this many points: neighbours become one, at the last of their steps with the mean of their values."""
    if len(points) <= most:
        return points
    parts = [points[i * len(points) // most : (i + 1) * len(points) // most] for i in range(most)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def _facts(rows: Sequence[Mapping[str, Any]], step: int, total: float | None, age: float) -> dict[str, str]:
    facts = {"step": f"{step:,}" + (f" of {total:,.0f} ({step / total:.0%})" if total else "")}
    facts["tokens"] = amount(rows[-1]["tokens"])
    seconds = _last(rows, "step_seconds")
    if total is not None and step >= total:
        facts["state"] = "finished"
    else:
        facts["last row"] = f"{duration(age)} ago"
        if seconds is not None and total is not None:
            facts["time left"] = duration((total - step) * seconds)
    shown = {
        "loss": "{:.4f}", "validation_loss": "{:.4f}", "grad_norm": "{:.3f}", "learning_rate": "{:.2e}",
        "step_seconds": "{:.3g} s", "ponder_mean_depth": "{:.2f}", "passes": "{:.0f}",
    }  # fmt: skip
    for name, pattern in shown.items():
        value = _last(rows, name)
        if value is not None:
            facts[_words(name)] = pattern.format(value)
    if (rate := _last(rows, "tokens_per_second")) is not None:
        facts["tokens/s"] = amount(rate)
    if (mfu := _last(rows, "mfu")) is not None:
        facts["MFU"] = f"{mfu:.1%}"
    for name in sorted({n for r in rows for n in r if n.startswith("skipped_")}):
        facts[_words(name)] = f"{_last(rows, name) or 0:.0f}"
    return facts


def _panels(rows: Sequence[Mapping[str, Any]]) -> tuple[Panel, ...]:
    shares, losses = (_by_pass(rows, f"ponder_{name}_pass") for name in ("active", "valid_loss"))
    panels = (
        Panel("loss", {"training": _points(rows, "loss"), "validation": _points(rows, "validation_loss")}),
        Panel("mean depth (passes)", {"depth": _points(rows, "ponder_mean_depth")}),
        Panel("share of tokens in each pass", shares),
        Panel("validation loss read out after each pass", losses),
        Panel("tokens/s", {"tokens/s": _points(rows, "tokens_per_second")}),
        Panel("seconds of a step", {_words(p): _points(rows, f"{p}_seconds") for p in STEP}),
        Panel("gradient norm", {"gradient norm": _points(rows, "grad_norm")}),
    )
    return tuple(p for p in panels if p.filled)


def _by_pass(rows: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, Points]:
    pattern = re.compile(re.escape(prefix) + r"([0-9]{1,4})")
    passes = sorted({int(match[1]) for r in rows for n in r if (match := pattern.fullmatch(n))})
    return {f"pass {p}": _points(rows, f"{prefix}{p}") for p in passes}


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [(float(r["step"]), float(r[name])) for r in rows if name in r]


def _last(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next((float(r[name]) for r in reversed(rows) if name in r and math.isfinite(r[name])), None)


def _words(name: str) -> str:
    return name.removeprefix("ponder_").replace("_", " ")
