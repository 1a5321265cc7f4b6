"""metrics.jsonl: one JSON object per row, appended, never two rows for one step.

A run that resumes from step 1000 after it had reached 1040 computes 1001 to 1040 again.  The old rows beyond 1000 are
moved to metrics.superseded.jsonl, so the series in metrics.jsonl belongs to the surviving weights and matches
that of a run that was never stopped.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaponder import files
from megaponder.errors import UserError
from megaponder.monitor.row import POSITION, Row

NAME = "metrics.jsonl"
SUPERSEDED = "metrics.superseded.jsonl"


LONGEST = 1 << 20
"""Maximum bytes of a line; a row has about a thousand."""


def scan(path: Path, needs: Sequence[str] = ()) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Rows of a file, and complete lines that are not rows: not JSON, or without one of the counts in `needs`."""
    rows, damaged = [], []
    for line in _lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and all(type(row.get(n)) is int and 0 <= row[n] < 2**62 for n in needs):
            rows.append(row)
        elif line.strip() and line.endswith(b"\n"):  # otherwise it is being written, or was cut off by a kill
            damaged.append(line)
    return rows, damaged


def _lines(path: Path) -> Iterator[bytes]:
    if path.is_file():
        with path.open("rb") as file:
            while line := file.readline(LONGEST):
                yield line


def read(path: Path, needs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of a file, without damaged lines."""
    return scan(path, needs)[0]


@dataclass(frozen=True)
class Series:
    """Rows of a run that can be shown: numbers by name, positions among them."""

    rows: list[dict[str, float]]
    damaged: int
    """Lines that are not rows."""
    odd: tuple[str, ...]
    """Names of values that are not numbers and were ignored."""

    def sentences(self) -> list[str]:
        """What was ignored, if anything."""
        lines = "1 line is not a row and was" if self.damaged == 1 else f"{self.damaged} lines are not rows and were"
        found = [f"{lines} ignored."] if self.damaged else []
        names = ", ".join(name[:40] for name in self.odd[:5]) + (", ..." if len(self.odd) > 5 else "")
        return found + ([f"Values that are not numbers were ignored: {names}."] if self.odd else [])


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**1000)


def of_run(run: Path) -> Series:
    """Rows of a run folder; UserError for a folder that has none."""
    if not run.is_dir():
        folder = run.parent
        there = sorted(p.parent.name for p in folder.glob(f"*/{NAME}")) if folder.is_dir() else []
        close = difflib.get_close_matches(run.name, there, 1, 0.5)
        fix = f"did you mean {folder / close[0]}" if close else f"{folder} has {', '.join(there[:8]) or 'no run'}"
        what = "this is not a run folder" if run.exists() else "there is no such run folder"
        raise UserError(f"{run}: {what}; {fix}.")
    if (run / NAME).exists() and not (run / NAME).is_file():
        raise UserError(f"{run / NAME} is not a file, so no run can have written metrics into it; move it away.")
    rows, damaged = scan(run / NAME, POSITION)
    if not rows:
        what = "not there"
        if (run / NAME).exists():
            what = "empty" if not (run / NAME).stat().st_size else "not a series of rows"
        raise UserError(
            f"{run} has no metrics yet ({run / NAME} is {what}); the first are written after logging.every steps."
        )
    odd = {name: None for row in rows for name, value in row.items() if not _is_number(value)}  # in their order
    numbers = [{n: v for n, v in row.items() if n not in odd or _is_number(v)} for row in rows]
    return Series(numbers, len(damaged), tuple(odd))


def rewind(run: Path, step: int) -> tuple[int, int]:
    """Move rows beyond `step`, and lines that are not rows, out of the series; returns how many of each."""
    path = run / NAME
    rows, damaged = scan(path, POSITION)
    beyond = [r for r in rows if r["step"] > step]
    if beyond or damaged:
        with files.naming(run / SUPERSEDED), (run / SUPERSEDED).open("ab") as file:
            file.writelines((json.dumps(r) + "\n").encode() for r in beyond)
            file.writelines(line.rstrip(b"\n") + b"\n" for line in damaged)
    if path.exists():  # also to drop a line that a kill cut off
        files.write_bytes(path, "".join(json.dumps(r) + "\n" for r in rows if r["step"] <= step).encode())
    return len(beyond), len(damaged)


class JsonLines:
    """Appends rows; each has been handed to the system when `write` returns.  What comes later about the step of the
    last row (an evaluation that a stop had interrupted, tasks) joins it."""

    def __init__(self, run: Path):
        self._path = run / NAME
        rows = read(self._path, POSITION)
        self._last: dict[str, Any] = rows[-1] if rows else {}
        self._file = self._path.open("a", buffering=1)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def write(self, row: Row) -> None:
        """Append a row; UserError if the file cannot be written or no longer exists, since rows would be lost."""
        if not self._is_there():
            raise UserError(
                f"{self._path} was removed, moved or replaced during the run; restore the run folder and "
                "run the same command again."
            )
        joins = self._last.get("step") == row.step
        self._last = (self._last if joins else {}) | row.flat()
        try:
            if joins:
                rows = [*read(self._path, POSITION)[:-1], self._last]
                files.write_bytes(self._path, "".join(json.dumps(r) + "\n" for r in rows).encode())
                self._file.close()
                self._file = self._path.open("a", buffering=1)
            else:
                self._file.write(json.dumps(self._last) + "\n")
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"{self._path} could not be written to ({why}); checkpoints are intact.") from error

    def close(self) -> None:
        """Close the file; `write` has already reported errors."""
        with contextlib.suppress(OSError):
            self._file.close()
