"""The figures of a comparison: loss over data, over training and inference compute, and by depth."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

from megaponder.compare.results import Group, Result

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d", "#8a6d00")
"""Told apart also by those who see few colours (Okabe and Ito)."""
MARKERS, LINES = "osD^vPX*", ("-", "--", ":")
SHOWN_FROM = 0.2
"""Share of the tokens before which losses may lie outside: the fall at the start would flatten all that matters."""
MOST_COLUMNS = 4
LOSS = "held-out loss (nats per token)"


def draw(groups: Sequence[Group]) -> Any:
    """A matplotlib figure with every panel that the groups can fill."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[Callable[[Any, Sequence[Group]], None]] = [_over_tokens, _over_training, _over_inference]
    if any(len(g.first.by_depth) > 1 for g in groups):
        panels.append(_by_depth)
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(11, 4.1 * rows + 0.25 * ((len(groups) + 2) // 3)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2).flatten()
    for place, panel in zip(axes, panels, strict=False):
        panel(place, groups)
        place.grid(alpha=0.25, linewidth=0.6)
        place.spines[["top", "right"]].set_visible(False)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    handles, names = axes[0].get_legend_handles_labels()
    widest = max(map(len, names))
    figure.legend(
        handles, names, loc="outside lower center", ncols=min(MOST_COLUMNS, len(names), max(1, 130 // (widest + 8))),
        frameon=False, fontsize=9,
    )  # fmt: skip
    return figure


def _style(i: int) -> dict[str, Any]:
    n = len(COLORS)
    return {"color": COLORS[i % n], "marker": MARKERS[i % len(MARKERS)], "linestyle": LINES[i // n % len(LINES)]}


def _curves(axes: Any, groups: Sequence[Group], x: str, scale: float) -> None:
    for i, group in enumerate(groups):
        rows = group.curve(x)
        if not rows:
            continue
        places = [row[0] / scale for row in rows]
        style = _style(i)
        axes.plot(
            places, [row[1] for row in rows], markersize=3.5, linewidth=1.6, label=_named(group),
            markevery=max(1, len(rows) // 10), **style,
        )  # fmt: skip
        if len(group.results) > 1:
            low, high = [row[2] for row in rows], [row[3] for row in rows]
            axes.fill_between(places, low, high, color=style["color"], alpha=0.18, linewidth=0)
    _cut(axes, groups)


def _cut(axes: Any, groups: Sequence[Group]) -> None:
    """Show losses from where each group has seen a part of its text."""
    late = [
        p.loss for g in groups for r in g.results for p in r.points if p.tokens >= SHOWN_FROM * r.last.tokens
    ]  # fmt: skip
    low, high = min(late), max(late)
    room = 0.06 * (high - low) or 0.05
    axes.set_ylim(low - room, high + room)


def _named(group: Group) -> str:
    n = len(group.results)
    return group.label if n == 1 else f"{group.label} ({n} runs)"


def _over_tokens(axes: Any, groups: Sequence[Group]) -> None:
    most = max(p.tokens for g in groups for r in g.results for p in r.points)
    units = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
    scale, unit = next(((size, name) for size, name in units if most >= size), (1.0, ""))
    _curves(axes, groups, "tokens", scale)
    axes.set(xlabel=f"training tokens{f' ({unit})' if unit else ''}", ylabel=LOSS, title="Equal data")


def _over_training(axes: Any, groups: Sequence[Group]) -> None:
    _curves(axes, groups, "needed", 1.0)
    axes.set(xlabel="training FLOPs that were needed", ylabel=LOSS, title="Equal training compute")
    _logarithmic(axes)


def _over_inference(axes: Any, groups: Sequence[Group]) -> None:
    # of one text: that of the sweeps where each run has one, else the held-out text of training
    swept = all(_as_trained(r) is not None for g in groups for r in g.results)
    for i, group in enumerate(groups):
        style = _style(i)
        for halting in (False, True):
            sweep = sorted((s.flops, s.loss) for s in group.first.sweep if s.halting in (halting, None))
            if len(sweep) > 1:
                style["linestyle"] = ":" if halting else "-"
                axes.plot(*zip(*sweep, strict=True), markersize=3, linewidth=1.1, alpha=0.8, **style)
        found = [_as_trained(r) if swept else r.loss for r in group.results]
        losses = [loss for loss in found if loss is not None]
        mean = sum(losses) / len(losses)
        error = [[mean - min(losses)], [max(losses) - mean]] if len(losses) > 1 else None
        axes.errorbar(
            [group.mean("inference")], [mean], yerr=error, color=style["color"], marker=style["marker"], markersize=8,
            markeredgecolor="white", linestyle="none", capsize=3,
        )  # fmt: skip
    axes.set(xlabel="FLOPs of a token in decoding", ylabel=LOSS, title="Equal inference compute")
    if any(len(g.first.sweep) > 1 for g in groups):
        told = "lines: other numbers of passes\ndotted: earlier halting"
        axes.text(0.98, 0.97, told, transform=axes.transAxes, fontsize=8, ha="right", va="top", color="#495057")
    _logarithmic(axes)


def _as_trained(result: Result) -> float | None:
    return next((s.loss for s in result.sweep if s.halting is None), None)


def _logarithmic(axes: Any) -> None:
    """A logarithmic x axis with few labels, whatever its span."""
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    decades = math.log10(high / low)
    axes.xaxis.set_major_locator(
        LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1.5 else (1.0, 3.0) if decades < 3 else (1.0,))
    )
    axes.xaxis.set_major_formatter(LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(9, 9)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _by_depth(axes: Any, groups: Sequence[Group]) -> None:
    deepest = 1
    for i, group in enumerate(groups):
        rows = group.first.by_depth
        if len(rows) > 1:
            axes.plot(list(rows), list(rows.values()), markersize=5, linewidth=1.4, **_style(i))
            deepest = max(deepest, *rows)
    axes.set_xticks(range(1, deepest + 1))
    axes.set(
        xlabel="pass that is read out; where tokens halt, their depth", ylabel=LOSS, title="Held-out loss by depth"
    )


def encoded(figure: Any, kind: str) -> bytes:
    """The figure as png or svg."""
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()
