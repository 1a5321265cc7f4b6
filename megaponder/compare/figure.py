"""The figures of a comparison: loss over data, training and inference compute; what passes bring, and who gets them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megaponder.compare import depth
from megaponder.compare.depth import Number
from megaponder.compare.results import Group, Result
from megaponder.inference.sweep import AS_TRAINED, HALTING, OTHER_PASSES, RANDOM

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d", "#8a6d00")
"""Told apart also by those who see few colours (Okabe and Ito)."""
MARKERS, LINES = "osD^vPX*", ("-", "--", ":")
SHOWN_FROM = 0.2
"""Share of the tokens before which losses may lie outside: the fall at the start would flatten all that matters."""
LEAST_SHOWN = 0.3
"""Nats above the worst model as it is that are always shown of its sweep."""
MOST_COLUMNS = 4
LOSS = "held-out loss (nats per token)"


def draw(groups: Sequence[Group]) -> Any:
    """A matplotlib figure with every panel that the groups can fill."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[Callable[[Any, Sequence[Group]], None]] = [_over_tokens, _over_training, _over_inference]
    if any(len(depth.losses(g)) > 1 or len(g.first.by_depth) > 1 for g in groups):
        panels.append(_by_depth)
    if any(depth.benefits(g) for g in groups):
        panels.append(_benefit)
    if any(depth.choices(g) for g in groups):
        panels.append(_choice)
    if any(depth.better_than(g, "shuffled") for g in groups):
        panels.append(_policy)
    for by in ("text", "frequency"):
        if any(depth.classes(g, by, "depth") for g in groups):
            panels.append(partial(_classes, by=by))
    columns = 2 if len(panels) <= 4 else 3
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 4.1 * rows + 0.25 * ((len(groups) + 2) // 3)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns).flatten()
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
    marker = MARKERS[(i + i // (n * len(LINES))) % len(MARKERS)]  # another one when colours and lines begin again
    return {"color": COLORS[i % n], "marker": marker, "linestyle": LINES[i // n % len(LINES)]}


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
        p.loss
        for g in groups
        for r in g.results
        for p in r.points
        if p.tokens >= SHOWN_FROM * r.last.tokens and math.isfinite(p.loss)
    ]
    if not late:
        return
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
    # all of one text: that of the sweeps where each run has one, else the held-out text of training, without sweeps
    swept = all(_as_trained(r) is not None for g in groups for r in g.results)
    for i, group in enumerate(groups):
        style = _style(i)
        points = depth.sweeps(group) if swept else []
        for kind, line in ((OTHER_PASSES, "-"), (HALTING, ":")):
            places = sorted((s.flops, s.loss) for s in points if s.kind in (kind, AS_TRAINED))
            if len(places) > 1:
                axes.plot(
                    *zip(*places, strict=True), markersize=3, linewidth=1.1, alpha=0.8, **style | {"linestyle": line}
                )
        if chance := [(s.flops, s.loss) for s in points if s.kind == RANDOM]:
            axes.scatter(*zip(*chance, strict=True), marker="x", s=16, linewidths=0.9, color=style["color"])
        found = [_as_trained(r) if swept else r.loss for r in group.results]
        loss = depth.number([loss for loss in found if loss is not None])
        error = [[loss.mean - loss.low], [loss.high - loss.mean]] if len(found) > 1 else None
        axes.errorbar(
            [group.mean("inference")], [loss.mean], yerr=error, color=style["color"], marker=style["marker"],
            markersize=8, markeredgecolor="white", linestyle="none", capsize=3,
        )  # fmt: skip
    best = depth.front([(s.flops, s.loss) for g in groups for s in depth.sweeps(g) if s.kind != RANDOM])
    if swept and len(best) > 1:
        axes.step(*zip(*best, strict=True), where="post", color="#adb5bd", linewidth=4, alpha=0.5, zorder=0)
        _cut_sweeps(axes, groups)
        told = "lines: other numbers of passes\ndotted: other thresholds\ncrosses: at random\ngrey: best of all"
        axes.text(
            0.98, 0.97, told, transform=axes.transAxes, fontsize=8, ha="right", va="top", color="#495057",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        )  # fmt: skip
    axes.set(xlabel="FLOPs of a token in decoding", ylabel=LOSS, title="Equal inference compute")
    _logarithmic(axes)


def _cut_sweeps(axes: Any, groups: Sequence[Group]) -> None:
    """Show losses near those of the models as they are: of one with too few passes it may be several times as large."""
    trained = [loss for g in groups for r in g.results if (loss := _as_trained(r)) is not None and math.isfinite(loss)]
    every = [s.loss for g in groups for s in depth.sweeps(g) if math.isfinite(s.loss)]
    if trained and every:
        low, spread = min(*every, *trained), max(trained) - min(trained)
        high = min(max(*every, *trained), max(trained) + max(spread, LEAST_SHOWN))
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _as_trained(result: Result) -> float | None:
    return next((s.loss for s in result.sweep if s.kind == AS_TRAINED), None)


def _logarithmic(axes: Any) -> None:
    """A logarithmic x axis with few labels, whatever its span; a plain one where it spans less than a factor of 5."""
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    decades = math.log10(high / low)
    if decades < math.log10(5):
        axes.set_xscale("linear")
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        return
    axes.xaxis.set_major_locator(
        LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1.5 else (1.0, 3.0) if decades < 3 else (1.0,))
    )
    axes.xaxis.set_major_formatter(LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(9, 9)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _by_depth(axes: Any, groups: Sequence[Group]) -> None:
    deepest, measured = 1, any(len(depth.losses(g)) > 1 for g in groups)
    for i, group in enumerate(groups):
        rows = dict(enumerate(depth.losses(group), 1)) if measured else depth.by_depth(group)
        if len(rows) > 1:
            style = _style(i)
            if measured or group.first.depth is None:
                _with_range(axes, rows, **style)
            else:  # other tokens at each depth: no curve
                places, losses = list(rows), [n.mean for n in rows.values()]
                axes.plot(places, losses, markersize=6, fillstyle="none", **style | {"linestyle": "none"})
            deepest = max(deepest, *rows)
    axes.set_xticks(range(1, deepest + 1))
    axes.set(
        xlabel="passes after which all tokens stop"
        if measured
        else "pass that is read out; hollow: of the tokens that halt there",
        ylabel=LOSS,
        title="Held-out loss by depth",
    )


def _with_range(axes: Any, rows: Mapping[int, Number], **style: Any) -> None:
    axes.plot(list(rows), [n.mean for n in rows.values()], markersize=5, linewidth=1.4, **style)
    axes.fill_between(
        list(rows), [n.low for n in rows.values()], [n.high for n in rows.values()], color=style["color"], alpha=0.18,
        linewidth=0,
    )  # fmt: skip


def _benefit(axes: Any, groups: Sequence[Group]) -> None:
    deepest = 1
    for i, group in enumerate(groups):
        rows = {k + 1: n for k, n in depth.benefits(group).items()}
        if rows:
            _with_range(axes, rows, **_style(i))
            deepest = max(deepest, *rows)
    axes.axhline(0, color="#868e96", linewidth=0.8)
    axes.set_xticks(range(2, deepest + 1))
    axes.set(xlabel="pass", ylabel="what it takes off the loss (nats per token)", title="Benefit of each pass")


def _choice(axes: Any, groups: Sequence[Group]) -> None:
    """Of what could be gained beyond chance by choosing half of the tokens, the share that the score gains."""
    deepest = 2
    for i, group in enumerate(groups):
        rows = {}
        for c in depth.choices(group):
            room = c.hindsight.mean - c.random.mean
            if room > 0:
                rows[c.after + 1] = (c.score.mean - c.random.mean) / room
        if rows:
            axes.plot(list(rows), [100 * v for v in rows.values()], markersize=5, linewidth=1.4, **_style(i))
            deepest = max(deepest, *rows)
    axes.axhline(0, color="#868e96", linewidth=0.8)
    axes.set_xticks(range(2, deepest + 1))
    axes.set(
        xlabel="pass for which half of the tokens are chosen", ylabel="% of the way from chance to hindsight",
        title="Does the score know whom a pass helps?",
    )  # fmt: skip


def _policy(axes: Any, groups: Sequence[Group]) -> None:
    names, place = [], 0
    for i, group in enumerate(groups):
        shuffled, uniform = (depth.better_than(group, other) for other in ("shuffled", "uniform"))
        if shuffled is None or uniform is None:
            continue
        for offset, found, fill in ((-0.18, shuffled, 1.0), (0.18, uniform, 0.45)):
            around = [[found.mean - found.low], [found.high - found.mean]]
            axes.barh(place + offset, found.mean, 0.34, xerr=around, color=_style(i)["color"], alpha=fill, capsize=2)
        names.append(group.label)
        place += 1
    axes.set_yticks(range(place), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="#868e96", linewidth=0.8)
    axes.set(
        xlabel="loss of chance less loss of the model's own choice (nats)",
        title="Own choice against shuffled (full) and uniform depth (pale)",
    )


def _classes(axes: Any, groups: Sequence[Group], by: str) -> None:
    known = [(i, depth.classes(g, by, "depth")) for i, g in enumerate(groups)]
    known = [(i, rows) for i, rows in known if rows]
    names = list(dict.fromkeys(name for _, rows in known for name in rows))
    for i, rows in known:
        style = _style(i) | {"linestyle": "none"}
        axes.plot([rows[n].mean for n in names if n in rows], [k for k, n in enumerate(names) if n in rows], **style)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    title = {"text": "Depth by kind of token", "frequency": "Depth of common and rare tokens"}[by]
    axes.set(xlabel="mean passes", title=title)


def encoded(figure: Any, kind: str) -> bytes:
    """The figure as png or svg."""
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()
