"""`megaponder compare`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaponder.cli.parser import Commands

SUMMARY = "compare runs: loss over data, training FLOPs and inference FLOPs, and what else differs between them"

EPILOG = """\
examples
  megaponder compare runs/vanilla runs/ponderlm               a table here, figures and a page in comparison/
  megaponder compare runs/*-seed? --out report                runs that differ in their seed alone are one curve
  megaponder eval runs/ponderlm --depth                       measures it at other depths, into runs/ponderlm/eval.json
  megaponder compare runs/vanilla runs/ponderlm               now also loss by depth, what passes bring, who gets them

It writes compare.png, compare.svg, compare.md, compare.csv, compare.tex and compare.html, one page that needs nothing
else.  Curves and FLOPs are what the runs wrote while they trained; nothing is computed again.  Every setting besides
the method in which the runs differ is named: it may explain a result as well as the method does.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("compare", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument("--out", default="comparison", metavar="FOLDER", help="folder to write (default comparison)")


def run(args: argparse.Namespace) -> int:
    from megaponder.compare import differences, page, results, table
    from megaponder.errors import UserError

    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: a file has this name; name a folder.")
    named: dict[Path, Path] = {}
    for name in args.runs:
        named.setdefault(Path(name).resolve(), Path(name))
    paths = list(named.values())
    if len(missing := [str(path) for path in paths if not path.is_dir()]) > 1:
        raise UserError(f"{', '.join(missing)}: there are no such run folders.")
    for path in missing:  # whatever is wrong with the others; it says which run may be meant
        results.read_run(Path(path))
    found = [results.read_run(path) for path in paths]
    found, said = results.of_one_text(found)
    groups = results.grouped(found, differences.labels(found))
    warnings, notes = differences.warnings(groups), said + results.notes_of(groups)
    for one in table.tables(groups):
        print(table.markdown(one))
    for sentence in warnings:
        print(f"warning: besides the method, {sentence}")
    for note in notes:
        print(note)
    written = page.write(out, "Comparison of runs", groups, warnings, notes)
    print(f"{written[-1]}: open it in a browser; figure in {out / 'compare.png'}.")
    return 0
