"""Schedules: hand-worked values at every corner, and purity."""

import math

import pytest

from megaponder.config.schema import OptimizerConfig, ScheduleConfig
from megaponder.training.schedule import build_schedule


def schedule(kind: str, total: int = 100, **fields):
    values = {"warmup_fraction": 0.1, "min_lr_fraction": 0.1, "decay_fraction": 0.2} | fields
    return build_schedule(ScheduleConfig(kind=kind, **values), OptimizerConfig(lr=1.0), total)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_is_linear_and_ends_at_the_peak(kind):
    lr = schedule(kind)
    assert [lr(s) for s in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])


@pytest.mark.parametrize(
    ("kind", "step", "value"),
    [
        ("cosine", 55, 0.1 + 0.9 * 0.5),  # half way between 10 and 100
        ("cosine", 100, 0.1),
        ("cosine", 40, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 3))),
        ("linear", 55, 0.55),
        ("linear", 100, 0.1),
        ("constant", 100, 1.0),
        ("wsd", 80, 1.0),
        ("wsd", 90, 0.55),
        ("wsd", 100, 0.1),
    ],
)
def test_hand_worked_values(kind, step, value):
    assert schedule(kind)(step) == pytest.approx(value)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_beyond_the_budget_the_floor_holds(kind):
    assert schedule(kind)(1000) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_tiny_budgets_and_no_warm_up(kind, total):
    lr = schedule(kind, total, warmup_fraction=0.0, decay_fraction=0.0)
    values = [lr(s) for s in range(1, total + 1)]
    assert all(0.1 - 1e-12 <= v <= 1.0 for v in values) and values == sorted(values, reverse=True)
    assert values == [lr(s) for s in range(1, total + 1)]
