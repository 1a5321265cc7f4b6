"""Relative paths of a run's configuration, read in another folder than the one that the run was started in.

They start in the folder that the run was started in, and so does a relative `run`.  So the place of a run tells where
they start: what calls itself `runs/first` and lies in /home/me/lm/runs/first was started in /home/me/lm.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaponder.config.schema import RunConfig
from megaponder.data.blend import prefix_of


def at_home(cfg: RunConfig, checkpoint: Path) -> RunConfig:
    """The configuration of a checkpoint whose tokenizer and datasets are found from any folder.

    Paths that exist as they are stay, and so does what does not exist beside the run either.
    """
    home = _home(cfg.run, checkpoint)
    if home is None:
        return cfg
    data, valid, tokenizer = cfg.data, cfg.data.valid, cfg.data.tokenizer
    there: Any = {k: _blend(v, home) for k, v in valid.items()} if isinstance(valid, dict) else _blend(valid, home)
    if tokenizer not in (None, "bytes") and not Path(tokenizer).exists() and (home / tokenizer).exists():
        tokenizer = str(home / tokenizer)
    return replace(cfg, data=replace(data, tokenizer=tokenizer, train=_blend(data.train, home), valid=there))


def _home(run: str, checkpoint: Path) -> Path | None:
    """Where the run of a checkpoint was started; None where its place does not tell."""
    if Path(run).is_absolute():
        return None
    own, named = Path(os.path.abspath(checkpoint)).parts[:-2], Path(os.path.normpath(run)).parts  # RUN/checkpoints/STEP
    begin = len(own) - len(named)
    return Path(*own[:begin]) if begin > 0 and own[begin:] == named else None


def _blend(items: list[str | float], home: Path) -> list[str | float]:
    def found(item: str | float) -> str | float:
        if not isinstance(item, str):
            return item
        index = f"{prefix_of(item)}.idx"
        return item if Path(index).exists() or not (home / index).exists() else str(home / item)

    return [found(item) for item in items]
