"""A comparison as files: figure, tables, and one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from megaponder import files
from megaponder.compare import figure, table
from megaponder.compare.results import Group

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 28px auto; max-width: 1180px; padding: 0 16px; color: #212529; }
h1 { font-size: 22px; } h2 { font-size: 16px; margin-top: 28px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px; text-align: right; border-bottom: 1px solid #dee2e6; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
.warning { background: #fff4e0; border-left: 4px solid #e69f00; padding: 8px 14px; }
svg { width: 100%; height: auto; } .scroll { overflow-x: auto; }
"""


def write(
    folder: Path, title: str, groups: Sequence[Group], warnings: Sequence[str], notes: Sequence[str]
) -> list[Path]:
    """compare.{md,csv,tex,png,svg,html} in `folder`; their paths."""
    drawn = figure.draw(groups)
    svg = figure.encoded(drawn, "svg")
    contents = {
        "md": _markdown(title, groups, warnings, notes).encode(),
        "csv": table.comma_separated(groups).encode(),
        "tex": "\n".join(map(table.latex, table.tables(groups))).encode(),
        "png": figure.encoded(drawn, "png"),
        "svg": svg,
        "html": _page(title, groups, warnings, notes, svg.decode()).encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, content in contents.items():
        files.write_bytes(path := folder / f"compare.{suffix}", content)
        paths.append(path)
    return paths


def _markdown(title: str, groups: Sequence[Group], warnings: Sequence[str], notes: Sequence[str]) -> str:
    said = "".join(f"- {sentence}\n" for sentence in warnings)
    first, *more = map(table.markdown, table.tables(groups))
    parts = [f"# {title}\n", first, "![Loss over data and compute](compare.png)\n", *more]
    if said:
        parts.append(f"Besides the method, these settings differ:\n\n{said}")
    return "\n".join([*parts, *(f"{note}\n" for note in notes)])


def _page(title: str, groups: Sequence[Group], warnings: Sequence[str], notes: Sequence[str], svg: str) -> str:
    first, *more = map(_table, table.tables(groups))
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in warnings)
    differ = f'<div class="warning">Besides the method, these settings differ:<ul>{said}</ul></div>' if said else ""
    told = "".join(f"<p>{escape(note)}</p>" for note in notes)
    drawing = svg[svg.index("<svg") :]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{differ}"
        f"{first}{told}{drawing}{''.join(more)}</body></html>\n"
    )


def _table(made: table.Table) -> str:
    cells = [[escape(c) for c in row] for row in made.rows]
    head = "".join(f"<th>{c}</th>" for c in cells[0])
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in cells[1:])
    title = f"<h2>{escape(made.title)}</h2>" if made.title else ""
    return f'{title}<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
