"""`train --profile`: which steps and ranks are watched, and what is written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from megaponder.config.schema import LoggingConfig
from megaponder.training.profile import Profile


def _run(folder: Path, rank: int, said: list[str], sizes: tuple[int, ...] = (3, 5, 7, 9)) -> None:
    """Steps that multiply matrices of these sizes, which tell them apart."""
    with Profile(LoggingConfig(profile_steps=[2, 3], profile_ranks=[1]), folder, rank, said.append) as profile:
        profile.expect(len(sizes))
        for size in sizes:
            with profile.step():
                if not size:
                    raise ValueError("a step that fails")
                torch.ones(size, size) @ torch.ones(size, size)


def _shapes(folder: Path) -> list[list[int]]:
    """Of the matrices in the trace."""
    trace = json.loads(gzip.decompress((folder / "profile" / "trace-rank1.json.gz").read_bytes()))
    return [e["args"]["Input Dims"][0] for e in trace["traceEvents"] if e["name"] == "aten::mm"]


def test_chosen_steps_are_written(tmp_path: Path) -> None:
    said: list[str] = []
    _run(tmp_path, 1, said)
    assert _shapes(tmp_path) == [[5, 5], [7, 7]]
    assert "aten::mm" in (tmp_path / "profile" / "operations-rank1.txt").read_text()
    assert len(said) == 1 and str(tmp_path / "profile") in said[0]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    _run(tmp_path, 0, said)
    assert not said and not (tmp_path / "profile").exists()


def test_a_run_that_ends_in_between_is_written(tmp_path: Path) -> None:
    said: list[str] = []
    _run(tmp_path, 1, said, sizes=(3, 5))
    assert _shapes(tmp_path) == [[5, 5]] and said[-1].startswith("Step 2 of this start")


def test_steps_beyond_the_end_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    _run(tmp_path, 1, said, sizes=(3,))
    assert said == ["Nothing will be profiled: logging.profile_steps are 2 to 3, and this start has 1."]


def test_a_failure_leaves_no_profiler_behind(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(ValueError):
        _run(tmp_path, 1, said, sizes=(3, 0))
    assert not said and not torch.autograd._profiler_enabled()


def test_what_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("no folder")
    said: list[str] = []
    _run(tmp_path, 1, said)
    assert len(said) == 1 and "cannot be written" in said[0]
