"""The stages of upcycling: their configurations are legal, and the dense model spends what they spend together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gentle_start import resolved
from benchmarks.study.corpus import Corpus
from benchmarks.study.rows import Row, rows
from benchmarks.upcycle import KINDS, REST, WAYS, losses, report, spent, stages
from megaponder.config.rules import check
from megaponder.ponder.facts import facts_of

HELDOUT = {kind: {"tokens": n} for kind, n in (*((kind, 10) for kind in KINDS), ("law", 30), ("code", 10))}
TEXT = Corpus("text", {}, 1, 1.0, 1, 1, HELDOUT, 511, "")
SIZES = {"docs": 100, "textbooks": 200, "encyclopedic": 50, REST: 650}


def configs() -> tuple[dict[str, Any], dict[str, Any]]:
    kind = next(row.kind for row in rows("tiny") if row.kind.name == "vanilla")
    base = Row(kind, "tiny", 1, 1.0, 10**6).config(TEXT, "runs/tiny.base", False)
    return base, stages(base, Path("runs"), TEXT, SIZES, 10**6)


def test_every_stage_is_legal_and_the_dense_model_spends_as_much() -> None:
    base, made = configs()
    assert len(made) == len(KINDS) + 2 * len(WAYS) + 1
    for name, config in made.items():
        cfg, method = resolved(config)
        check(cfg, facts_of(method), 1)
        assert cfg.train.only == {"expert": ["mlp"], "routers": ["routers"]}.get(name.split("-")[0], [])
        assert bool(cfg.train.disciplines) == name.endswith("labels")
    names = [*(f"expert-{kind}" for kind in KINDS), "routers-sum", "mixture-sum"]
    total, step = sum(spent(made[name]) for name in names), spent(base) / base["train"]["steps"]
    assert spent(made["dense"]) == pytest.approx(total, abs=step)
    weights = made["dense"]["data"]["train"][::2]
    assert sum(weights) == pytest.approx((3 * 0.18 + 0.09 + 0.45) * 1e6)
    assert weights[3] == pytest.approx(0.65 * 0.54 * 1e6)


def test_the_table_has_a_row_for_each_stage() -> None:
    row: dict[str, Any] = {"kinds": {kind: {"loss": 2.0} for kind in HELDOUT}, "loss": 2.5}
    row["kinds"]["code"] = {"loss": 6.0}
    assert losses(row, TEXT) == {"docs": 2.0, "textbooks": 2.0, "encyclopedic": 2.0, REST: 3.0, "all": 2.5}
    trained = row | {"curve": [{"tokens": 10}], "executed_flops": 1e9, "parameters": 5, "command": "c", "origin": "o"}
    found = {"base": trained, "split-sum": row, "mixture-sum": trained | {"router": {"moe_load_max": 1.5}}}
    lines = report("tiny", found, TEXT).splitlines()
    assert "| mixture-sum | 5 | 10 | 1e+09 | 2.0000 | 2.0000 | 2.0000 | 3.0000 | 2.5000 |" in lines
    assert any(line.startswith("| mixture-sum | 1.500 |") for line in lines)
