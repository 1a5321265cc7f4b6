"""`<run>/faults.jsonl`: one JSON object for every skipped step, rollback and hang.

The record has consequences: sequences skipped by a rollback stay skipped in every later start of the run.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaponder import files
from megaponder.monitor import jsonl
from megaponder.ranks import on_first_rank

Window = tuple[int, int]
"""Sequences [first, end) of the training stream."""


class FaultRecord:
    """The file of one run; all ranks call `append` and `rows`, rank 0 touches the file."""

    def __init__(self, run: Path):
        self.path = run / "faults.jsonl"

    def append(self, event: str, **values: Any) -> None:
        """Add an event.  Non-finite numbers become null, since JSON has none."""
        if dist.get_rank() == 0:
            write(self.path, event, **values)

    def rows(self) -> list[dict[str, Any]]:
        """All events: a collective."""
        return on_first_rank(lambda: jsonl.read(self.path))

    def left_out(self) -> list[Window]:
        """Sequences that the run skips, merged, in order: a collective."""
        merged: list[Window] = []
        for first, end in sorted(tuple(r["sequences"]) for r in self.rows() if r.get("skip_data")):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((first, end))
        return merged


def write(path: Path, event: str, **values: Any) -> None:
    """Append one line."""
    row = {"event": event, **values, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.naming(path), path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def past(windows: list[Window], first: int, count: int) -> int:
    """Where a batch of `count` sequences may start at or after `first` without overlapping a window."""
    for begin, end in windows:
        if first < end and first + count > begin:
            first = end
    return first
