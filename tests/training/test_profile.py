"""`train --profile`: which steps and ranks are watched, and what is written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from megaponder.config.schema import LoggingConfig
from megaponder.training.profile import Profile


def _run(folder: Path, rank: int, said: list[str]) -> None:
    profile = Profile(LoggingConfig(profile_steps=[2, 3], profile_ranks=[1]), folder, rank, said.append)
    for size in (3, 5, 7, 9):  # the size of the product tells the step
        with profile.step():
            torch.ones(size, size) @ torch.ones(size, size)


def test_chosen_steps_are_written(tmp_path: Path) -> None:
    said: list[str] = []
    _run(tmp_path, 1, said)
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "trace-rank1.json.gz").read_bytes()))
    shapes = [e["args"]["Input Dims"][0] for e in trace["traceEvents"] if e["name"] == "aten::mm"]
    assert shapes == [[5, 5], [7, 7]]
    assert "aten::mm" in (tmp_path / "profile" / "operations-rank1.txt").read_text()
    assert len(said) == 1 and str(tmp_path / "profile") in said[0]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    _run(tmp_path, 0, said)
    assert not said and not (tmp_path / "profile").exists()
