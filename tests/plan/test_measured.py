"""The memory estimate against the peaks that benchmarks measured on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import config, planned_gib
from benchmarks.training_rows import Row

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TABLES = ("methods", "baseline", "passes", "ponderlm2", "halting", "one-gpu", "two-gpus")


def _rows() -> list[dict[str, Any]]:
    rows = [r for t in TABLES for r in json.loads((RESULTS / f"training-{t}.json").read_text())]
    return [r for r in rows if "error" not in r and not r["row"]["plain"]]


@pytest.mark.parametrize("measured", _rows(), ids=lambda r: r["name"])
def test_estimate_is_within_a_tenth(measured: dict[str, Any]) -> None:
    row = Row(**measured["row"])
    devices = measured["devices"]
    planned = planned_gib(row, config(row, measured["micro_batches"], devices), devices, 0)
    assert planned == pytest.approx(measured["peak_gib"], rel=0.10)
