"""The sweep of learning rates: what its runs differ in, where its curves are lowest, and its table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study.corpus import Corpus
from benchmarks.transfer import SWEEPS, optimum, points, report
from megaponder.config.load import from_mapping
from megaponder.config.resolve import resolve
from megaponder.config.rules import check
from megaponder.ponder.facts import facts_of
from megaponder.ponder.settings import initialisation, method_of

TEXT = Corpus("text", {}, 1, 1.0, 1, 1, {}, 511, "")


@pytest.mark.parametrize("sweep", SWEEPS)
def test_runs_are_legal_and_differ_in_what_is_swept(sweep: str) -> None:
    every = list(points(sweep, "tiny", 4096))
    assert len({p.name for p in every}) == len(every)
    for p in every:
        cfg = resolve(from_mapping(p.config(TEXT, Path("run"), False)))
        method = method_of(cfg)
        check(cfg, facts_of(method), 1)
        assert cfg.optimizer.lr == p.lr and cfg.model.head_size == 16
        assert (p.value, p.carried) != (p.tuned, True)
        carried = {"width": cfg.optimizer.tuned_width, "passes": cfg.optimizer.tuned_passes}
        assert carried == {s: p.tuned if p.carried and s == sweep else None for s in SWEEPS}
        if sweep == "width":
            assert cfg.model.hidden_size == p.value
        else:
            assert facts_of(method).max_passes == p.value
        assert initialisation(cfg.model, method) == ("trunc_normal", (2 / 5 / cfg.model.hidden_size) ** 0.5, 6**-0.5)


def test_the_optimum_is_that_of_a_parabola() -> None:
    def loss(lr: float) -> float:
        return 3.0 + 0.1 * math.log(lr / 3.3e-3) ** 2

    assert optimum([(lr, loss(lr)) for lr in (5e-4, 2e-3, 4e-3, 2e-2)]) == pytest.approx(3.3e-3)
    assert optimum([(lr, loss(lr)) for lr in (4e-3, 8e-3, 2e-2)]) is None
    assert optimum([(2e-3, 3.2), (4e-3, 3.1), (8e-3, math.inf)]) == 4e-3


def test_the_table_tells_what_the_tuned_rate_costs() -> None:
    def row(value: int, carried: bool, lr: float, loss: float) -> dict[str, Any]:
        told = {"value": value, "tuned": 128, "carried": carried, "lr": lr, "curve": [{"loss": loss}], "tokens": 10}
        return told | {"command": "c", "origin": "o"}

    losses = {(128, False): (4.2, 4.0, 4.1), (256, False): (3.8, 3.9, 4.5), (256, True): (3.85, 3.7, math.nan)}
    found = [row(*model, lr, loss) for model, ls in losses.items() for lr, loss in zip((1, 2, 4), ls, strict=True)]
    lines = [line.split(" | ") for line in report("6x256", {"width": found}).splitlines() if line.startswith("| ")]
    cells = {(line[0], line[1]): line[-2:] for line in lines[1:]}
    assert cells == {
        ("| 128", "none"): ["2.2", "+0.0000 |"],
        ("| 256", "none"): ["the lowest", "+0.1000 |"],
        ("| 256", "tuned_width: 128"): ["2", "+0.0000 |"],
    }
