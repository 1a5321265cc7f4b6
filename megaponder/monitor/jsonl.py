"""metrics.jsonl: one JSON object a row, appended, never two rows for one step.

A run that resumes from step 1000 after it had reached 1040 computes 1001 to 1040 again.  The old rows beyond 1000 are
moved to metrics.superseded.jsonl, so that the series in metrics.jsonl is the one of the weights that live on, and
overlays that of a run that was never stopped.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaponder import files
from megaponder.errors import UserError
from megaponder.monitor.row import POSITION, Row

NAME = "metrics.jsonl"
SUPERSEDED = "metrics.superseded.jsonl"


def read(path: Path, needs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of a file; a line that a kill has cut off, or that is no text, is left out, as is one that lacks one of the
    integers `needs`."""
    rows = []
    for text in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and all(isinstance(row.get(n), int) for n in needs):
            rows.append(row)
    return rows


def of_run(run: Path) -> list[dict[str, Any]]:
    """Rows of a run folder; UserError for a folder that has none."""
    if not run.is_dir():
        folder = run.parent
        there = sorted(p.parent.name for p in folder.glob(f"*/{NAME}")) if folder.is_dir() else []
        close = difflib.get_close_matches(run.name, there, 1, 0.5)
        fix = f"did you mean {folder / close[0]}" if close else f"{folder} has {', '.join(there[:8]) or 'no run'}"
        what = "this is no run folder" if run.exists() else "there is no such run folder"
        raise UserError(f"{run}: {what}; {fix}.")
    if not (rows := read(run / NAME, POSITION)):
        what = "not there"
        if (run / NAME).exists():
            what = "empty" if (run / NAME).is_file() and not (run / NAME).stat().st_size else "no series of rows"
        raise UserError(f"{run} has no metrics yet ({run / NAME} is {what}); the first come after logging.every steps.")
    return rows


def rewind(run: Path, step: int) -> int:
    """Move rows beyond `step` out of the series; returns how many."""
    path = run / NAME
    rows = read(path, POSITION)
    beyond = [r for r in rows if r["step"] > step]
    if beyond:
        with (run / SUPERSEDED).open("a") as file:
            file.writelines(json.dumps(r) + "\n" for r in beyond)
    if path.exists():  # also to drop a line that a kill has cut off
        files.write_bytes(path, "".join(json.dumps(r) + "\n" for r in rows if r["step"] <= step).encode())
    return len(beyond)


class JsonLines:
    """Appends rows; each is on its way to the disk when `write` returns."""

    def __init__(self, run: Path):
        self._path = run / NAME
        self._file = self._path.open("a", buffering=1)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def write(self, row: Row) -> None:
        """Append a row; UserError where the file cannot take it or is no longer there, since rows would be lost."""
        if not self._is_there():
            raise UserError(
                f"{self._path} was removed, moved or replaced while the run was going; put the run folder back and "
                "start the same command again."
            )
        try:
            self._file.write(json.dumps(row.flat()) + "\n")
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"{self._path} could not be written to ({why}); checkpoints are whole.") from error

    def close(self) -> None:
        """Close the file; what could not be written was told by `write`."""
        with contextlib.suppress(OSError):
            self._file.close()
