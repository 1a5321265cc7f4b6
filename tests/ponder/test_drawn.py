"""Numbers that change from step to step: their distributions, their bounds, and the same ones everywhere."""

from __future__ import annotations

import math
import statistics

import pytest

from megaponder.errors import ConfigError
from megaponder.ponder.base import Shape
from megaponder.ponder.drawn import DrawnOptions, poisson
from megaponder.ponder.registry import build_method

STEPS = range(4000)


def numbers(s: int, **options: object) -> list[int]:
    drawn = DrawnOptions(**options)  # type: ignore[arg-type]
    return [drawn.number(s, 7, step) for step in STEPS]


def test_huginns_distribution() -> None:
    """Mean 33.3, median 29 and 99 % quantile 94 at mean_recurrence 32 (measured on the official sampler)."""
    found = numbers(32, draw="lognormal", draw_to=1000)
    assert statistics.mean(found) == pytest.approx(33.3, abs=0.8)
    assert statistics.median(found) == pytest.approx(29, abs=1)
    assert sorted(found)[int(0.99 * len(found))] == pytest.approx(94, abs=5)
    assert max(numbers(32, draw="lognormal")) <= 128, "the default bound is four times the mean"


def test_poisson_and_uniform() -> None:
    found = numbers(8, draw="poisson", draw_to=1000)
    assert statistics.mean(found) == pytest.approx(8, abs=0.15)
    assert statistics.variance(found) == pytest.approx(8, abs=0.6)
    exact = [math.exp(-2.5) * 2.5**k / math.factorial(k) for k in range(12)]
    for k in range(12):
        middle = sum(exact[:k]) + exact[k] / 2
        assert poisson(2.5, middle) == k
    assert poisson(700.0, 0.5) == 700
    found = numbers(3, draw="uniform", draw_to=10)
    assert [found.count(k) / len(found) for k in range(1, 11)] == pytest.approx([0.1] * 10, abs=0.02)
    assert set(numbers(3, draw="uniform")) == {1, 2, 3, 4, 5}, "the mean is that of evaluation"


def test_a_curriculum_grows_to_the_full_number() -> None:
    linear = DrawnOptions(grow_steps=8)
    assert [linear.number(4, 0, step) for step in range(10)] == [1, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    root = DrawnOptions(grow_steps=8, grow="root")
    slow = [root.number(4, 0, step) for step in range(10)]
    assert slow == [math.ceil(4 * (1 - math.sqrt(1 - min(1, t / 8)))) or 1 for t in range(10)]
    grown = DrawnOptions("uniform", 1, 10, grow_steps=1000)
    means = [statistics.mean(grown.number(5, 0, t) for t in part) for part in (range(200), range(1000, 1200))]
    assert means[0] < 1.6 and means[1] == pytest.approx(5.5, abs=0.5)


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"draw": "normal"}, "draw", "it must be fixed, uniform, poisson or lognormal; use lognormal"),
        ({"grow": "cubic"}, "grow", "it must be linear or root; use linear"),
        ({"draw": "uniform", "draw_from": 0}, "draw_from", "at least 1"),
        ({"draw": "uniform", "draw_from": 7, "draw_to": 5}, "draw_to", "at least draw_from = 7; use 7"),
        ({"draw": "uniform", "draw_from": 4}, "draw_to", "at least draw_from = 4; use 6"),
        ({"draw_to": 5}, "draw_to", "draw = fixed draws no number; use 0, or draw: uniform"),
        ({"grow_steps": -1}, "grow_steps", "at least 0"),
    ],
)
@pytest.mark.parametrize("method", ["loop", "ponderlm"])
def test_options_that_do_not_fit(method: str, options: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_method(method, options, Shape("llama", 2, 32))
    assert refused.value.field == f"ponder.options.{field}" and words in str(refused.value)


WITHOUT_SENSE: list[tuple[str, dict[str, object], str]] = [
    ("loop", {"draw_from": 2}, "draw_from = 2: draw = fixed draws no number; use 1, or draw: uniform"),
    ("loop", {"grow": "root"}, "grow = 'root': with grow_steps = 0 the number does not grow; use linear, or set"),
    ("loop", {"draw": "poisson", "draw_to": 2}, "draw_to = 2: it must be at least extra_passes = 3, with which the"),
    ("ponderlm", {"draw": "poisson", "draw_from": 4}, "draw_from = 4: it must be at most steps = 3, with which the"),
    ("huginn", {"recurrence": 100, "draw_to": 8}, "draw_to = 8: it must be at least recurrence = 100, with which the"),
    ("parcae", {"recurrence": 100, "draw_to": 8}, "draw_to = 8: it must be at least recurrence = 100, with which the"),
    ("huginn", {"recurrence": 4, "kept": 17}, "kept = 17: it must be at most 16, the most recurrences of a step; the"),
    ("parcae", {"recurrence": 4, "draw_to": 5, "kept": 6}, "kept = 6: it must be at most 5, the most recurrences of"),
    ("retrofit", {"kv_budget": 5}, "kv_budget = 5: a token runs 4 passes, so it would keep those of all; use 0"),
    ("ouro", {"kv_budget": 5}, "kv_budget = 5: a token runs 4 passes, so it would keep those of all; use 0"),
    ("huginn", {"kv_rule": "anchor"}, "kv_rule = 'anchor': all keys and values are kept while kv_budget is 0; give"),
    (
        "huginn",
        {"exit_by": "entropy"},
        "exit_by = 'entropy': nothing stops while exit_below is 0; give exit_below, too",
    ),
    ("parcae", {"exit_by": "likeliest", "exit_below": 0.5}, "exit_below = 0.5: with exit_by = likeliest it counts"),
]


@pytest.mark.parametrize(("name", "options", "words"), WITHOUT_SENSE)
def test_options_without_sense_together(name: str, options: dict[str, object], words: str) -> None:
    """A run with them is not started; the checkpoints of one that was can be read."""
    method = build_method(name, options, Shape("llama", 10, 32))
    with pytest.raises(ConfigError) as refused:
        method.check_run()
    assert str(refused.value).startswith(f"ponder.options.{words}")


@pytest.mark.parametrize(
    "name", ["loop", "ponderlm", "huginn", "parcae", "retrofit", "ouro", "nanbeige", "adaponderlm"]
)
def test_defaults_are_a_run(name: str) -> None:
    method = build_method(name, {}, Shape("llama", 10, 32))
    method.check_run()
    build_method(name, vars(method.options), Shape("llama", 10, 32)).check_run()  # as an export states them
    if hasattr(method.options, "kept"):  # its default is no mistake
        build_method(name, {"recurrence": 1, "draw_to": 1}, Shape("llama", 10, 32)).check_run()


def test_plans_follow_the_numbers_and_evaluation_does_not() -> None:
    shape = Shape("llama", 2, 32)
    for name, count in (("loop", "extra_passes"), ("ponderlm", "steps")):
        method = build_method(name, {count: 3, "draw": "uniform", "draw_to": 9}, shape)
        lengths = {len(method.passes(0, step)) for step in range(200)}
        assert lengths == set(range(2, 11)) and len(method.longest(0)) == 10
        assert len(method.passes(0, None)) == 4
        for plan in (method.passes(0, 5), method.longest(0)):
            assert [p.last for p in plan] == [False] * (len(plan) - 1) + [True]
