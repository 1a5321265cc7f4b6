"""Warnings about what a method spends."""

from __future__ import annotations

from typing import Any

import pytest

from megaponder.ponder.base import Shape
from megaponder.ponder.registry import build_method
from megaponder.training.budget import Budget, ends_before_the_ramp, random_is_as_good, without_effect
from megaponder.training.evaluate import Evaluation

SHAPE = Shape("llama", 2, 32)


def _told(options: dict[str, Any], stats: dict[str, float], rows: int = 40) -> dict[str, str | None]:
    """What 40 rows, one every 5 steps, say."""
    budget = Budget(build_method("adaponderlm", options, SHAPE), every=5)
    told: dict[str, str | None] = {}
    for row in range(rows):
        told = budget.warnings(1000 + 5 * row, stats)
    return told


def _active(*shares: float) -> dict[str, float]:
    return {f"active_pass{i}": s for i, s in enumerate(shares)} | {"mean_depth": sum(shares)}


def test_nothing_is_said_where_all_is_well() -> None:
    stats = _active(1, 1, 0.45) | {"wanted_depth": 2.41, "price_of_a_pass": 0.004}
    assert set(_told({"target": 0.6}, stats).values()) == {None}
    assert _told({"target": 0.6}, stats | {"wanted_depth": 3.0}, rows=39) == {}  # 200 steps are not there yet


def test_a_budget_that_is_missed_is_named() -> None:
    for depth in (2.25, 2.55):
        said = _told({"target": 0.6}, _active(1, 1, 0.5) | {"wanted_depth": depth})["budget"]
        assert said is not None and f"{depth:.2f} passes" in said and "budget is 2.40" in said
    paper = _told({"target": 0.0, "bottom_share": 0.1}, _active(1, 1, 0.1, 0.1))
    assert paper["budget"] is not None and "budget is 3.60; ponder.options.target would hold it" in paper["budget"]
    assert paper["one gate"] is not None and "100% halt after pass 1" in paper["one gate"]


def test_options_that_a_budget_leaves_without_effect_are_told() -> None:
    said = without_effect(build_method("adaponderlm", {"target": 0.7, "threshold": 0.5, "bottom_share": 0.3}, SHAPE))
    assert said == (
        "ponder.options.target = 0.7 leaves threshold = 0.5, bottom_share = 0.3 without effect; target: 0.0 is the "
        "form that reads them."
    )
    for method, options in (
        ("adaponderlm", {"target": 0.0, "threshold": 0.5}),
        ("adaponderlm", {"target": 0.7, "threshold": 1e-4}),  # its default, as in files that name every option
        ("ponderlm3", {"target": 0.7, "score_weight": 0.2}),
        ("vanilla", {}),
    ):
        assert without_effect(build_method(method, options, SHAPE)) is None


def test_a_run_that_ends_before_the_ramp_is_told() -> None:
    method = build_method("adaponderlm", {"target": 0.6, "ramp_end": 100}, SHAPE)
    assert "ramp_end is 100, but the run ends at step 99" in (ends_before_the_ramp(method, 99) or "")
    assert ends_before_the_ramp(method, 100) is None
    assert ends_before_the_ramp(build_method("vanilla", {}, SHAPE), 1) is None
    grows = build_method("loop", {"grow_steps": 100}, SHAPE)
    assert "grow_steps is 100, but the run ends at step 99" in (ends_before_the_ramp(grows, 99) or "")
    assert ends_before_the_ramp(grows, 100) is None


def test_one_open_gate_is_no_collapse() -> None:
    assert _told({"target": 0.6}, _active(1, 1, 0.4))["one gate"] is None
    assert _told({"target": 0.75}, _active(1, 1, 0.4, 0.4) | {"wanted_depth": 3.0})["one gate"] is not None


def test_a_negative_price_is_named() -> None:
    stats = _active(1, 1, 0.4) | {"price_of_a_pass": -0.02}
    said = _told({"target": 0.6}, stats)["price"]
    assert said is not None and "-0.0200 nats" in said and "smaller ponder.options.target" in said
    ramp = {"target": 0.6, "ramp_end": 1100}  # while all may go on the threshold says nothing of the budget
    assert _told(ramp, stats)["price"] is None and _told(ramp, stats, rows=61)["price"] is not None


@pytest.mark.parametrize(
    ("options", "step", "decides"),
    [({"target": 0.6, "ramp_end": 9}, 8, False), ({"target": 0.6, "ramp_end": 9}, 9, True),
     ({"target": 1.0}, 9, False), ({"target": 0.0, "ramp_end": 9}, 8, True)],
)  # fmt: skip
def test_a_policy_is_judged_once_it_decides(options: dict[str, Any], step: int, decides: bool) -> None:
    assert Budget(build_method("adaponderlm", options, SHAPE), every=5).decides(step) == decides


@pytest.mark.parametrize(("at_random", "warns"), [(3.1, False), (3.0, True), (2.9, True)])
def test_a_policy_no_better_than_chance_is_named(at_random: float, warns: bool) -> None:
    said = random_is_as_good(Evaluation(3.0, {"loss_at_random": at_random}))
    assert (said is not None) == warns and random_is_as_good(Evaluation(3.0, {})) is None
