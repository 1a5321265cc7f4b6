"""What the scripts of this folder share: their parser, numbers with a range, the end of a mistake, files of results."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megaponder.cli.parser import Parser
from megaponder.cli.report import ended

RESULTS = Path(__file__).parent / "results"


def script(main: Callable[[list[str] | None], Any]) -> Callable[..., int]:
    """`main(argv)` that returns an exit code; a user's mistake is one sentence and code 2, as in `megaponder`."""

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        return ended(lambda: main(argv))

    return run


def parser(name: str, doc: str | None) -> Parser:
    """The parser of benchmarks/NAME.py, with the script's docstring as its help."""
    return Parser(prog=f"python -m benchmarks.{name}", description=doc)


def typed(name: str, argv: Sequence[str] | None) -> str:
    """The command that runs benchmarks/NAME.py with these words; None: those of this process."""
    return shlex.join(["python", "-m", f"benchmarks.{name}", *(sys.argv[1:] if argv is None else argv)])


def number(least: float, multiple: int | None = None) -> Callable[[str], Any]:
    """The type of an argument: a number of `least`'s own type, no less than it."""
    kind = type(least)

    def read(word: str) -> float:
        value = kind(word)
        if not value >= least:  # also nan
            raise argparse.ArgumentTypeError(f"{word}: it must be at least {least}; use {least}")
        if multiple and value % multiple:
            near = max(round(value / multiple) * multiple, least)
            raise argparse.ArgumentTypeError(f"{word}: it must be a multiple of {multiple}; use {near}")
        return value

    read.__name__ = kind.__name__  # argparse: invalid int value
    return read


def folder(word: str) -> Path:
    """The type of an argument: a folder, or a place for one."""
    if not word or (Path(word).exists() and not Path(word).is_dir()):
        raise argparse.ArgumentTypeError(f"{word!r}: it must be a folder; name one, it is made where it is absent")
    return Path(word)


def add_output(parser: Parser) -> None:
    """`--output`, the same in every script that writes results."""
    parser.add_argument(
        "--output", type=folder, default=RESULTS, help="folder of the results; default: benchmarks/results"
    )


def write(folder: Path, name: str, results: Any, report: str) -> None:
    """FOLDER/NAME.json and .md, under other names first: a full disk leaves those of before."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f"{name}.json": json.dumps(results, indent=1, default=str) + "\n", f"{name}.md": report}
    for file, text in texts.items():
        (folder / f"{file}.partial").write_text(text)
    for file in texts:
        (folder / f"{file}.partial").replace(folder / file)
