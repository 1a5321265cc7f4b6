"""The tree as a figure (PNG, SVG) and as one HTML page that needs nothing else."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from typing import Any

from megaponder import files
from megaponder.lineage import tree as trees
from megaponder.lineage.tree import Edge, Tree

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d", "#8a6d00")
RECORDS = {"agrees": "#009e73", "family only": "#e69f00", "disagrees": "#d55e00"}
NEAR = 0.15
"""Of the largest distance from a root: the width of a label."""
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 28px auto; max-width: 1080px; padding: 0 16px; color: #212529; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .scroll { overflow-x: auto; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid #dee2e6; } th:first-child { text-align: left; }
.wrong { background: #fff4e0; border-left: 4px solid #e69f00; padding: 4px 12px; } svg { width: 100%; height: auto; }
"""


def write(folder: Path, tree: Tree) -> list[Path]:
    """tree.{png,svg,html} in `folder`; their paths."""
    figure = draw(tree)
    contents = {"png": _encoded(figure, "png"), "svg": (svg := _encoded(figure, "svg"))}
    contents["html"] = _page(tree, svg.decode()).encode()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"tree.{suffix}" for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        files.write_bytes(path, content)
    return paths


def places(tree: Tree) -> dict[int, tuple[float, float]]:
    """Of each node: its distance from the root (x) and its row (y).

    A line of descent keeps its row, but a model that is so near to its parent that their labels would overlap has a
    row of its own, as all have whose queries and keys are the parent's.
    """
    children: dict[int, list[Edge]] = {}
    for edge in tree.edges:
        children.setdefault(edge.parent, []).append(edge)
    x = {family[0]: 0.0 for family in tree.families}
    for edge in tree.edges:  # parents come first
        x[edge.child] = x[edge.parent] + edge.distance
    near = NEAR * max(x.values())
    found: dict[int, tuple[float, float]] = {}
    row = -1

    def put(i: int, y: int) -> None:
        nonlocal row
        found[i] = (x[i], float(y))
        below = children.get(i, [])
        straight = next((edge for edge in below if edge.distance > near), None)
        if straight is not None:
            put(straight.child, y)
        for edge in below:
            if edge is not straight:
                row += 1
                put(edge.child, row)

    for family in tree.families:
        row += 1
        put(family[0], row)
    return found


def draw(tree: Tree) -> Any:
    """A matplotlib figure: branches as long as the weights moved, records dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    spots = places(tree)
    near = NEAR / 2 * max(x for x, _ in spots.values())
    rows = 1 + max(int(y) for _, y in spots.values())
    figure = Figure(figsize=(9.5, 1.4 + 0.95 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for edge in tree.edges:
        (x0, y0), (x1, y1) = spots[edge.parent], spots[edge.child]
        axes.plot([x0, x0, x1], [y0, y1, y1], color="#868e96", linewidth=1.6, zorder=1)
        where = ((x0 + x1) / 2, y1) if y0 == y1 or x1 - x0 > near else (x0, y1 - 0.4)
        axes.annotate(f"{edge.score:.3f}", where, (3, 3), textcoords="offset points", fontsize=7)
    for check in tree.checks:
        if check.parent is not None:
            color = RECORDS[check.kind]
            bent = {"arrowstyle": "->", "color": color, "linestyle": "--", "connectionstyle": "arc3,rad=-0.25"}
            axes.annotate("", spots[check.child], spots[check.parent], arrowprops=bent, zorder=2)
    for number, family in enumerate(tree.families):
        color = COLORS[number % len(COLORS)]
        for i in family:
            x, y = spots[i]
            axes.plot([x], [y], marker="o", markersize=9, color=color, zorder=3)
            name = Path(tree.nodes[i].name).name
            axes.annotate(f"{name}\n{tree.nodes[i].label}", (x, y), (0, -9), textcoords="offset points", va="top",
                          ha="center", fontsize=7.5)  # fmt: skip
    far = max(x for x, _ in spots.values()) or 1.0
    axes.set(xlim=(-0.18 * far, 1.18 * far), ylim=(rows - 0.2, -0.6), yticks=[],
             xlabel="distance from the root: arccos of robust AWM scores (radians), along the branches")  # fmt: skip
    axes.set_title("grey: tree from the weights; dashed: what checkpoints record (green: agree)", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _encoded(figure: Any, kind: str) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def _page(tree: Tree, svg: str) -> str:
    names = [escape(node.name) for node in tree.nodes]
    head = "".join(f"<th>{i}</th>" for i in range(1, len(names) + 1))
    body = "".join(
        f"<tr><th>{i} {name}</th>{''.join(f'<td>{score:.3f}</td>' for score in row)}</tr>"
        for i, (name, row) in enumerate(zip(names, tree.scores, strict=True), 1)
    )
    said = "".join(
        f'<p class="{"" if check.kind == "agrees" else "wrong"}">{check.kind}: {escape(check.words)}</p>'
        for check in tree.checks
    )
    text = escape("\n".join(trees.lines(tree)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Lineage</title>'
        f"<style>{STYLE}</style></head><body><h1>Lineage of {len(names)} models</h1>{svg[svg.index('<svg') :]}{said}"
        f'<h2>Robust AWM scores</h2><div class="scroll"><table><tr><th></th>{head}</tr>{body}'
        f"</table></div><pre>{text}</pre></body></html>\n"
    )
