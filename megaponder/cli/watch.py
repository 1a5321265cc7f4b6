"""`megaponder watch`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from megaponder.cli.parser import Commands

SUMMARY = "a board of one or more runs: loss, depth, throughput, phases; in the terminal or as an HTML file"

EPILOG = """\
examples
  megaponder watch runs/first                       refreshed every 5 s until the run is finished, or Ctrl-C
  megaponder watch runs/first runs/second           both boards, one above the other
  megaponder watch runs/first --once                printed once, for scripts
  megaponder watch runs/first --html board.html     a page for a browser that reloads itself; no network
  megaponder watch runs/first --html board.html --once

It reads RUN/metrics.jsonl and nothing else, so it works from any machine that sees the folder, during and after the
run.  The time between rows is logging.every steps.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("watch", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument("--html", metavar="FILE", help="write a page instead of drawing in the terminal")
    parser.add_argument("--once", action="store_true", help="show the current state and stop")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between refreshes (default 5)")


def run(args: argparse.Namespace) -> int:
    from megaponder.errors import ConfigError, UserError

    if not args.every > 0:
        raise ConfigError("--every", args.every, "it must be more than 0 seconds", "use 5")
    page = Path(args.html) if args.html else None
    if page is not None and not page.parent.is_dir():
        raise UserError(f"--html {page}: there is no folder {page.parent}.")
    if page is not None and page.is_dir():
        raise UserError(f"--html {page}: this is a folder; give a file, for example {page / 'board.html'}.")
    runs = [Path(name) for name in args.runs]
    if page is not None:
        return _pages(runs, page, args.every, args.once)
    return _terminal(runs, args.every, args.once)


def _terminal(runs: list[Path], every: float, once: bool) -> int:
    from rich.console import Console, Group
    from rich.live import Live

    from megaponder.monitor import series
    from megaponder.monitor.board import board

    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    now = [series.overview(run) for run in runs]
    if once or all(o.finished for o in now) or not console.is_terminal:
        console.print(Group(*map(board, now)))
        return 0
    with Live(Group(*map(board, now)), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            now = [series.overview(run) for run in runs]
            live.update(Group(*map(board, now)), refresh=True)
            if all(o.finished for o in now):
                return 0


def _pages(runs: list[Path], path: Path, every: float, once: bool) -> int:
    from megaponder.monitor import page, series

    now = [series.overview(run) for run in runs]
    page.write(now, path, every)
    steps = ", ".join(f"{o.step:,}" for o in now)
    print(f"{path}: step {steps}; open it in a browser.", flush=True)
    while not once and not all(o.finished for o in now):
        time.sleep(every)
        now = [series.overview(run) for run in runs]
        page.write(now, path, every)
    return 0
