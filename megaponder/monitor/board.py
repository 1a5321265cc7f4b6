"""The board in a terminal."""

from __future__ import annotations

import math

from rich.console import Group
from rich.panel import Panel as Box
from rich.table import Table
from rich.text import Text

from megaponder.monitor.series import Overview, Panel, Points, averaged

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48


def board(overview: Overview) -> Box:
    """Facts, and a line of block characters for every curve."""
    facts = Table.grid(padding=(0, 2))
    for _ in range(4):
        facts.add_column()
    items = list(overview.facts.items())
    for left, right in zip(items[::2], [*items[1::2], ("", "")], strict=False):
        facts.add_row(*(Text(word) for word in (*left, *right)))  # text, no markup: names come from a file
    curves = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "right"):
        curves.add_column(justify=justify, no_wrap=True)
    curves.add_row("", "", "first", "last")
    for panel in overview.panels:
        _add(curves, panel)
    return Box(Group(facts, "", curves), title=Text(overview.run), expand=False)


def _add(table: Table, panel: Panel) -> None:
    several = len(panel.curves) > 1
    for name, points in panel.curves.items():
        if points:
            title = f"{panel.title}: {name}" if several else panel.title
            table.add_row(title, spark(points), f"{points[0][1]:.4g}", f"{points[-1][1]:.4g}")


def spark(points: Points, width: int = WIDTH) -> str:
    """At most `width` blocks, each the mean of its share of the points; a value that is not finite is a cross."""
    values = [y for _, y in averaged(points, width)]
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] if math.isfinite(v) else "x" for v in values)
