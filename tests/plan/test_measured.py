"""The memory estimate against the peaks that benchmarks measured on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaponder.config.facts import facts_of
from megaponder.plan.memory import GIB, rank_memory
from megaponder.ponder.settings import method_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TABLES = ("methods", "baseline", "ponderlm2")


def _rows() -> list[dict[str, Any]]:
    rows = [r for t in TABLES for r in json.loads((RESULTS / f"training-{t}.json").read_text())]
    return [r for r in rows if "error" not in r and not r["row"]["plain"]]


@pytest.mark.parametrize("measured", _rows(), ids=lambda r: r["name"])
def test_estimate_is_within_a_tenth(measured: dict[str, Any]) -> None:
    from benchmarks.training import Row, config

    cfg = config(Row(**measured["row"]), measured["micro_batches"])
    method = method_of(cfg)
    plan = rank_memory(cfg, facts_of(method), method.passes(cfg.train.seed, 0), measured["devices"], 0, te=True)
    assert plan.total / GIB == pytest.approx(measured["peak_gib"], rel=0.10)
