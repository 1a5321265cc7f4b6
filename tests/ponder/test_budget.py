"""Budgets: their windows, and a threshold that finds and keeps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaponder.config.resolve import resolve
from megaponder.config.schema import ModelConfig, PonderConfig, RunConfig
from megaponder.decoding.window import window
from megaponder.errors import ConfigError
from megaponder.ponder.base import Shape
from megaponder.ponder.budget import Budgeted, lottery
from megaponder.ponder.facts import facts_of
from megaponder.ponder.registry import build_method
from megaponder.ponder.settings import as_a_run_meant_it, with_stated_options

SHAPE = Shape("llama", 2, 32)
METHODS = ("adaponderlm", "adaptive_cot", "ponderlm3", "confident_ponderlm")


@pytest.mark.parametrize(
    ("target", "deepest", "least", "most"),
    [
        *[(0.9, 4, 3, 4), (0.7, 4, 2, 3), (0.6, 4, 2, 3), (0.3, 4, 1, 2), (0.25, 4, 1, 2), (1.0, 4, 3, 4)],
        *[(0.75, 4, 2, 4), (0.5, 4, 1, 3), (0.51, 4, 1, 3), (0.97, 4, 3, 4), (0.5, 2, 1, 2), (0.7, 3, 1, 3)],
    ],
)
def test_window(target: float, deepest: int, least: int, most: int) -> None:
    found = window(target, deepest)
    assert (found.least, found.most) == (least, most)
    assert found.least <= found.mean == pytest.approx(target * deepest) and found.mean <= found.most


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("target", "nearest"), [(0.2, "0.25"), (1.5, "1"), (-1.0, "0")])
def test_impossible_targets_are_refused(method: str, target: float, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"ponder.options.target = {target}.*use {nearest}\b"):
        build_method(method, {"target": target}, SHAPE)


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_is_the_default_and_the_published_form_is_asked_for(method: str) -> None:
    made = build_method(method, {}, SHAPE)
    assert made.options.target == 0.9 and made.window is not None  # type: ignore[attr-defined]
    assert made.budget(0) == pytest.approx(3.6)
    assert build_method(method, {"target": 0.0, "threshold": 0.5}, SHAPE).window is None
    with pytest.raises(ConfigError, match=r"threshold = 0.5: .*target, which is 0.9 .*set target to 0.0, or leave thr"):
        build_method(method, {"threshold": 0.5}, SHAPE)


def test_runs_keep_the_form_that_they_were_started_with() -> None:
    def config(method: str, **options: Any) -> RunConfig:
        model = ModelConfig(family="llama", num_layers=2, hidden_size=32, num_heads=2)
        return resolve(RunConfig(model=model, ponder=PonderConfig(method, options)))

    def stated(cfg: RunConfig, before: PonderConfig | None = None) -> dict[str, Any]:
        return with_stated_options(cfg, before).ponder.options

    assert stated(config("adaponderlm", steps=2)) == {"steps": 2, "target": 0.9}
    old = as_a_run_meant_it(config("adaponderlm", steps=2, threshold=0.5).ponder)
    assert old.options == {"steps": 2, "threshold": 0.5, "target": 0.0}  # files of earlier versions do not state it
    assert as_a_run_meant_it(old) == old
    assert stated(config("adaponderlm", steps=2, threshold=0.5), old) == old.options
    assert stated(config("adaponderlm", target=0.6), old) == {"target": 0.6}
    assert stated(config("adaptive_cot"), old) == {"target": 0.9}  # another method: a run of its own
    assert stated(config("ponderlm", steps=2), old) == {"steps": 2}
    assert as_a_run_meant_it(PonderConfig("not-known-here", {"a": 1})).options == {"a": 1}


def test_a_ramp_leads_from_all_passes_to_the_budget() -> None:
    method = build_method("adaponderlm", {"target": 0.75, "ramp_start": 10, "ramp_end": 20}, SHAPE)
    assert facts_of(method, 1).has_parameters  # which builds its modules on no device
    assert [method.budget(s) for s in (0, 10)] == [4.0, 4.0]
    assert method.budget(20) == pytest.approx(3.0) and method.budget(999) == pytest.approx(3.0)
    assert 3.0 < method.budget(15) < 4.0  # type: ignore[operator]


def _simulate(target: float, scores: Any, steps: int = 300, explore: float = 0.0) -> list[float]:
    """Depths that the scores want, step by step: `scores(step, decision)` of 1,000 tokens; a share is not drawn."""
    method = build_method("adaponderlm", {"target": target, "gate_width": 1}, SHAPE)
    assert isinstance(method, Budgeted) and method.window is not None
    gates, depths = torch.nn.ModuleDict({"budget": method.gates()}), []
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        theta, share = gates["budget"].theta.item(), gates["budget"].state[5].item()  # type: ignore[index]
        means = dict.fromkeys(
            ("budget/seen", "budget/score", "budget/score_sq", "budget/ran", "budget/benefit_sq"), 0.0
        )
        here = wanted = torch.ones(1000, dtype=torch.bool)
        for i in range(method.window.gates):
            g = scores(step, i)
            high = g >= theta
            means["budget/seen"] += here.float().mean().item()
            means["budget/score"] += (g * here).mean().item()
            means["budget/score_sq"] += (g.square() * here).mean().item()
            means[f"budget/asked{i}"] = (here & wanted).float().mean().item()
            means[f"budget/went{i}"] = (here & wanted & high).float().mean().item()
            drawn = torch.rand(1000, generator=draw) < share
            here = here & torch.where(torch.rand(1000, generator=draw) < explore, drawn, high)
            wanted = wanted & high
        depths.append(method.settle(gates, means, step)["wanted_depth"])
    return depths


@pytest.mark.parametrize(("target", "explore"), [(0.9, 0.0), (0.75, 0.0), (0.75, 1.0), (0.6, 0.0)])
@pytest.mark.parametrize("shape", ["normal", "skewed", "drifting", "stuck"])
def test_the_threshold_finds_the_budget(target: float, shape: str, explore: float) -> None:
    """Whatever the scores' distribution is, while it drifts, and after all tokens were on one side."""
    draw = torch.Generator().manual_seed(1)

    def scores(step: int, decision: int) -> torch.Tensor:
        x = torch.randn(1000, generator=draw)
        if shape == "skewed":
            return x.exp() * 0.1
        if shape == "drifting":
            return 0.1 * x + 0.01 * step
        if shape == "stuck" and step < 50:
            return torch.full((1000,), 3.0)  # all alike: all go on, or none
        return x * (1 + decision) + 0.5

    depths = _simulate(target, scores, explore=explore)
    assert sum(depths[100:]) / 200 == pytest.approx(4 * target, abs=0.05)
    assert sum(depths[-20:]) / 20 == pytest.approx(4 * target, abs=0.1)


class _Tools:
    def __init__(self, step: int | None):
        draw = torch.Generator().manual_seed(2)
        self.step = None if step is None else torch.tensor(float(step), dtype=torch.float64)
        self.positions_sb = torch.arange(512)[:, None].expand(512, 64)
        self.ids_sb = torch.randint(0, 8192, (512, 64), generator=draw)


def test_the_lottery_is_fair_and_its_draws_are_independent() -> None:
    draws = [lottery(_Tools(step), index).flatten() for step in (None, 0, 1, 1000) for index in (0, 1, 2)]  # type: ignore[arg-type]
    for x in draws:
        assert x.min() >= 0 and x.max() < 1
        assert torch.histc(x.float(), 10, 0, 1).div(len(x)).sub(0.1).abs().max() < 0.01
    together = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert together.abs().max() < 0.03
