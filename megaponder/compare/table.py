"""The table of a comparison, as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megaponder.compare.results import Group
from megaponder.monitor.registry import amount


@dataclass(frozen=True)
class Column:
    """One number of each group."""

    title: str
    value: str
    """Name that `Group.mean` knows."""
    show: Callable[[float], str]
    spread: bool = False


COLUMNS = (
    Column("tokens", "tokens", amount),
    Column("loss", "loss", lambda v: f"{v:.4f}", spread=True),
    Column("bits/byte", "bits_per_byte", lambda v: f"{v:.4f}", spread=True),
    Column("depth", "depth", lambda v: f"{v:.2f}"),
    Column("parameters", "parameters", amount),
    Column("needed FLOPs", "needed", lambda v: f"{v:.3g}"),
    Column("executed FLOPs", "executed", lambda v: f"{v:.3g}"),
    Column("seconds", "seconds", lambda v: f"{v:,.0f}"),
    Column("inference FLOPs/token", "inference", lambda v: f"{v:.3g}"),
)


def _cells(group: Group, columns: Sequence[Column]) -> list[str]:
    cells = [group.label, str(len(group.results))]
    for column in columns:
        mean, spread = group.mean(column.value), group.spread(column.value)
        text = "" if mean is None else column.show(mean)
        if column.spread and spread is not None:
            text += f" ± {column.show(spread)}"
        cells.append(text)
    return cells


def rows(groups: Sequence[Group]) -> list[list[str]]:
    """Titles, then a row a group; columns that no group fills are left out."""
    columns = [c for c in COLUMNS if any(g.mean(c.value) is not None for g in groups)]
    return [["method", "runs", *(c.title for c in columns)], *(_cells(g, columns) for g in groups)]


def markdown(groups: Sequence[Group]) -> str:
    """A table that is also easy to read as text."""
    lines = rows(groups)
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]

    def line(row: Sequence[str]) -> str:
        padded = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths))
    return "\n".join([line(lines[0]), f"|{rule}|", *map(line, lines[1:])]) + "\n"


def comma_separated(groups: Sequence[Group]) -> str:
    """One row a run, with all digits: for other programs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "run", *(c.value for c in COLUMNS)])
    for group in groups:
        for result in group.results:
            values = [result.value(c.value) for c in COLUMNS]
            writer.writerow([group.label, result.name, *("" if v is None else repr(v) for v in values)])
    return out.getvalue()


def latex(groups: Sequence[Group]) -> str:
    """A booktabs table."""
    cells = [[_escaped(cell) for cell in row] for row in rows(groups)]
    body = [" & ".join(row).replace("±", r"$\pm$") + r" \\" for row in cells]
    lines = [r"\begin{tabular}{l" + "r" * (len(cells[0]) - 1) + "}", r"\toprule", body[0], r"\midrule", *body[1:]]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c) or (f"\\{c}" if c in "&%$#_{}" else c) for c in text)
