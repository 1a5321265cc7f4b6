"""The comparison of starts: every kind spends the same training FLOPs, and its configuration is legal."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gentle_start import KINDS, flops_per_token, going_on, report, resolved
from benchmarks.study.corpus import Corpus
from benchmarks.study.rows import Row, rows
from megaponder.config.rules import check
from megaponder.inference import variants
from megaponder.ponder.facts import facts_of

TEXT = Corpus("text", {}, 1, 1.0, 1, 1, {}, 511, "")


def base() -> dict[str, Any]:
    kind = next(row.kind for row in rows("tiny") if row.kind.name == "vanilla")
    return Row(kind, "tiny", 1, 1.0, 4096).config(TEXT, "base", False)


@pytest.mark.parametrize("name", KINDS)
def test_every_start_spends_the_same(name: str) -> None:
    flops = 1e5 * flops_per_token(base())
    config = going_on(base(), KINDS[name], 1e-3, flops, "run")
    cfg, method = resolved(config)
    check(cfg, facts_of(method), 1)
    assert method.embedding_scale() in (1.0, 32**0.5) and cfg.model.embedding_scale == "none"
    assert cfg.checkpoint.load == "base" and cfg.data.shuffle_seed != base()["data"]["shuffle_seed"]
    step = cfg.train.global_batch * cfg.data.sequence_length * flops_per_token(config)
    assert cfg.train.steps * step == pytest.approx(flops, abs=step)
    assert variants.has_threshold(cfg) == (name != "vanilla")
    if name != "vanilla":
        assert variants.with_passes(cfg, 1).ponder.method == "vanilla"
        state = {"layer": 1, "method_modules.feedback_gate.weight": 2}
        assert variants.own_weights(variants.with_passes(cfg, 1), state) == {"layer": 1}  # type: ignore[arg-type]
        assert variants.own_weights(cfg, state) == (state if KINDS[name].gentle else {"layer": 1})  # type: ignore[arg-type]


def test_the_table_has_the_best_rate_of_each_start_first() -> None:
    row = {"curve": [{"tokens": 10}], "executed_flops": 1e9, "bits_per_byte": 1.0, "flops_per_token": 1e6}
    first = row | {"loss": 3.0, "command": "c", "origin": "o", "parameters": 5}
    told = [("vanilla", 1e-3, 2.9), ("ponderlm-gentle", 1e-3, 2.95), ("ponderlm-gentle", 3e-3, 2.8)]
    text = report("tiny", first, [row | {"kind": k, "lr": lr, "loss": loss} for k, lr, loss in told])
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "e-" not in line][1:]
    assert [(line[0], line[1], line[5]) for line in lines] == [
        ("| ponderlm-gentle", "0.003", "-0.2000"),
        ("| ponderlm-gentle", "0.001", "-0.0500"),
        ("| vanilla", "0.001", "-0.1000"),
    ]
