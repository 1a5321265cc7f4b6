"""The board as one HTML file: no script, no network; the browser reloads the file by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from megaponder import files
from megaponder.monitor.series import Overview, Panel, averaged

COLORS = ("#1f77b4", "#d9480f", "#2b8a3e", "#862e9c", "#0b7285", "#c2255c", "#5f3dc4", "#846358")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 220, 58, 12, 12, 28
MOST_POINTS = 600
"""Points in one curve; beyond that neighbours are averaged."""

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 24px; color: #212529; background: #fff; }
h1 { font-size: 20px; } h2 { font-size: 14px; margin: 0 0 4px; font-weight: 600; }
dl { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 0 0 20px; }
dt { color: #60686f; font-size: 12px; } dd { margin: 0; font-size: 16px; font-variant-numeric: tabular-nums; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(460px, 1fr)); gap: 20px; }
svg { width: 100%; max-width: 560px; } text { font-size: 11px; fill: #495057; }
.legend { font-size: 12px; } .legend span { margin-right: 14px; }
"""


def page(overviews: Sequence[Overview], refresh: float) -> str:
    """The whole document, one run below the other; that of finished runs does not load itself again."""
    done = all(o.finished for o in overviews)
    again = "" if done else f'<meta http-equiv="refresh" content="{max(1, round(refresh))}">'
    title = escape(", ".join(o.run for o in overviews))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{again}<title>{title}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(map(_body, overviews))}</body></html>\n"
    )


def _body(overview: Overview) -> str:
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in overview.facts.items())
    panels = "".join(f"<section><h2>{escape(p.title)}</h2>{_svg(p)}{_legend(p)}</section>" for p in overview.panels)
    return f"<h1>{escape(overview.run)}</h1><dl>{facts}</dl><main>{panels}</main>"


def write(overviews: Sequence[Overview], path: Path, refresh: float) -> None:
    """Write the page; a browser never sees a partial file."""
    files.write_bytes(path, page(overviews, refresh).encode())


def _legend(panel: Panel) -> str:
    if len(panel.curves) < 2:
        return ""
    items = "".join(
        f'<span style="color:{COLORS[i % len(COLORS)]}">&#9632; {escape(name)}</span>'
        for i, name in enumerate(panel.curves)
        if panel.curves[name]
    )
    return f'<div class="legend">{items}</div>'


def _svg(panel: Panel) -> str:
    curves = {
        name: averaged([p for p in points if math.isfinite(p[1])], MOST_POINTS) for name, points in panel.curves.items()
    }
    every = [p for points in curves.values() for p in points]
    if not every:
        return "<p>no finite value</p>"
    x0, x1 = _span([x for x, _ in every])
    y0, y1 = _span([y for _, y in every])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (WIDTH - LEFT - RIGHT) * (x - x0) / (x1 - x0)
        return LEFT + across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - y0) / (y1 - y0)

    parts = []
    for i in range(5):
        value = y0 + (y1 - y0) * i / 4
        y = at(x0, value)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e9ecef"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for value, anchor in ((x0, "start"), (x1, "end")):
        x = at(value, y0)[0]
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">step {value:,.0f}</text>')
    for i, points in enumerate(curves.values()):
        color = COLORS[i % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in points))
        if len(points) == 1:
            x, y = at(*points[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
        elif points:
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title)}">{"".join(parts)}</svg>'


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:  # a single value is drawn in the middle
        half = abs(low) / 10 or 1.0
        return low - half, high + half
    return low, high
