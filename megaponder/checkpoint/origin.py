"""What a run came from, as the commands that make runs from others record it: `origin.json` in the run folder.

A run that training started from given weights needs no such file: its saved configuration has `checkpoint.load`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megaponder import files
from megaponder.config.schema import RunConfig

FILE = "origin.json"
LARGEST = 1 << 20
"""Bytes of such a file."""


@dataclass(frozen=True)
class Origin:
    """A run's source."""

    how: str
    """import, branch, average or load."""
    sources: tuple[str, ...]
    """Folders or checkpoints, as paths of the machine that recorded them."""


def record(run: Path, how: str, *sources: Path) -> None:
    """Write it into the folder of the new run."""
    files.write_json(run / FILE, {"how": how, "sources": [str(path.resolve()) for path in sources]})


def recorded(run: Path, cfg: RunConfig) -> Origin | None:
    """The source of a run whose saved configuration is `cfg`; None if nothing usable is recorded."""
    try:
        told = json.loads(files.read_bounded(run / FILE, LARGEST))
        return Origin(str(told["how"]), tuple(map(str, told["sources"])))
    except FileNotFoundError:
        return None if cfg.checkpoint.load is None else Origin("load", (cfg.checkpoint.load,))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
