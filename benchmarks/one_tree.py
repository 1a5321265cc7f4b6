"""Half of `compare_commits`: trains its cases with the package of one tree, and writes down their numbers.

It runs with that tree, which may be years older than this file, on PYTHONPATH.  So it knows of it only what users know,
the commands and `metrics.jsonl`, and how the tree's own tests start processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

COMPARED = ("loss", "auxiliary_loss", "grad_norm", "learning_rate", "validation_loss", "tokens")
"""Of a row of metrics, beside all that begins with ponder_."""


def commands(folder: str, port: int, lines: list[list[str]]) -> list[str]:
    """In a worker: what each command prints, all of them called inside `folder`.  RuntimeError if one fails."""
    from megaponder.cli.main import main

    os.chdir(folder)
    os.environ["MASTER_PORT"] = str(port)
    printed = []
    for words in lines:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main(words)
        if code:
            raise RuntimeError(f"megaponder {' '.join(words)}: exit code {code}\n{out.getvalue()}")
        printed.append(out.getvalue())
    return printed


def free_port() -> int:
    """A port that nobody has: the tests' own choice is one of a few hundred, and both trees would make the same."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def reason(error: AssertionError) -> str:
    """The line of the workers' output that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if re.match(r"(error|\S*Error)\b.*: ", line)), lines[-1])


def numbers(run: Path) -> dict[str, Any]:
    """All compared numbers of a run, by "step 3, loss"."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        f"step {row['step']}, {name}": value
        for row in rows
        for name, value in row.items()
        if name in COMPARED or name.startswith("ponder_")
    }


def measure(tree: Path, work: dict[str, Any], folder: Path, jobs: int) -> dict[str, Any]:
    """Results of every case: numbers and text by name, or {"failed": why} for one that ends in an error."""
    import megaponder
    from tests.distributed import run_workers

    if not Path(megaponder.__file__).is_relative_to(tree):
        sys.exit(f"{megaponder.__file__} was imported instead of the package in {tree}.")

    def call(lines: list[list[str]], world: int = 1) -> list[str]:
        args = {"folder": str(folder), "port": free_port(), "lines": lines}
        return run_workers("one_tree:commands", world, args=args, timeout=300)[0]

    def train(case: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        try:
            for world, words in case["lines"]:  # one start of the world for each: process groups start only once
                call([words], world)
        except AssertionError as error:
            return case["name"], {"failed": reason(error)}
        return case["name"], numbers(folder / case["name"])

    call([work["prepare"]])
    results: dict[str, Any] = {"dataset": {s: (folder / f"data.{s}").read_bytes().hex() for s in ("bin", "idx")}}
    with ThreadPoolExecutor(jobs) as pool:
        results |= dict(pool.map(train, work["cases"]))
    names = [name for name in work["generate"] if "failed" not in results[name]]
    for name, printed in zip(names, call([["generate", name, *work["prompt"]] for name in names]), strict=True):
        results[name]["generated text"] = printed
    return results


if __name__ == "__main__":
    here = Path(sys.argv[1])
    plan = json.loads((here / "work.json").read_text())
    found = measure(Path(sys.argv[2]).resolve(), plan, here, plan["jobs"])
    (here / "results.json").write_text(json.dumps(found))
