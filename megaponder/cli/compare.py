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
  megaponder eval runs/ponderlm --passes 1 2 3 4 --json runs/ponderlm/eval.json
  megaponder compare runs/vanilla runs/ponderlm               now with bits per byte, and the passes as a curve

It writes compare.png, compare.svg, compare.md, compare.csv, compare.tex and compare.html, one page that needs nothing
else.  Losses are held-out ones, by which runs wrote them while they trained; FLOPs, too, are what runs wrote.  Every
setting besides the method in which the runs differ is named: it may explain a result as well as the method does.
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
    found = [results.read_run(path) for path in dict.fromkeys(Path(name) for name in args.runs)]
    groups = results.grouped(found, differences.labels(found))
    warnings, notes = differences.warnings(groups), results.notes_of(groups)
    print(table.markdown(groups))
    for sentence in warnings:
        print(f"warning: besides the method, {sentence}")
    for note in notes:
        print(note)
    paths = page.write(out, "Comparison of runs", groups, warnings, notes)
    print(f"{paths[-1]}: open it in a browser; figure in {out / 'compare.png'}.")
    return 0
