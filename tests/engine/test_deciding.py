"""Who decides: budgets in training, scores, chance, or a caller's depths in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaponder.engine import cuda_on_cpu
from tests.layouts.cases import CASES, LENGTH, VOCAB, Case, disturb, run_config
from tests.layouts.layouts import LAYOUTS

cuda_on_cpu.install()

from megaponder.data.batch import MicroBatch  # noqa: E402
from megaponder.engine import groups  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.ponder.settings import method_of  # noqa: E402

HALTING = [
    "adaponderlm-llama-gqa",
    "adaptive-cot-llama-gqa",
    "ponderlm3-llama-gqa",
    "pruned-pythia",
    "confident-pythia",
    "adaponderlm-budget",
    "adaptive-cot-budget-skip",
    "ponderlm3-budget",
    "confident-budget-skip",
]


def _engine(case: Case, disturbed: bool = True) -> Any:
    cfg = run_config(case, LAYOUTS["one-batch1"])
    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    if disturbed:
        disturb(engine.stage.named_parameters())
    return engine


def _batch(seed: int = 3, rows: int = 2, length: int = LENGTH) -> MicroBatch:
    text = torch.randint(0, VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return MicroBatch(text[:, :-1], text[:, 1:], torch.ones(rows, length))


@pytest.mark.parametrize("name", HALTING)
def test_forced_depths_replace_decisions(name: str) -> None:
    engine, batch = _engine(CASES[name]), _batch()
    deepest = engine.stage.method.max_depth()
    forced = torch.randint(1, deepest + 1, (LENGTH, 2), generator=torch.Generator().manual_seed(1))
    own = engine.readout(batch)
    engine.stage.method.forced = forced
    out = engine.readout(batch)
    assert torch.equal(out.depth.long(), forced) and not torch.equal(out.depth, own.depth)
    # a token's own decisions, forced, are what it does anyway
    engine.stage.method.forced = own.depth.long()
    again = engine.readout(batch)
    assert torch.equal(again.depth, own.depth)
    if name != "ponderlm3-llama-gqa":  # which weighs in evaluation what forced depths leave out
        assert torch.allclose(again.hidden, own.hidden, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in HALTING if name not in ("ponderlm3-llama-gqa", "pruned-pythia")])
def test_random_decisions_have_the_shares_that_are_asked_for(name: str) -> None:
    case = CASES[name]
    if "budget" in name:
        case = Case(case.family, case.method, case.options | {"target": 0.6}, case.model)
    engine, batch = _engine(case), _batch(rows=64)
    method = engine.stage.method
    assert method.chooses
    least, gates = (1, method.max_depth() - 1) if method.window is None else (method.window.least, method.window.gates)
    found = []
    for share in (0.0, 0.3, 1.0):
        method.at_random = [share] * gates
        out = engine.readout(batch)
        found.append(float(out.depth.mean()) - least)
    assert found[0] == 0 and found[2] == gates
    assert found[1] == pytest.approx(sum(0.3**k for k in range(1, gates + 1)), abs=0.06)


def test_pruned_latents_are_left_out_of_a_hard_evaluation() -> None:
    """PonderLM-3: hard is soft at threshold 0, and differs from it where tail masses are below the threshold."""
    case = CASES["ponderlm3-llama-gqa"]
    batch = _batch()
    found = {}
    for threshold in (0.0, 0.3):
        engine = _engine(Case(case.family, case.method, case.options | {"threshold": threshold}, case.model))
        soft = engine.readout(batch).hidden
        engine.stage.method.hard = True
        hard = engine.readout(batch).hidden
        found[threshold] = float((hard - soft).abs().max())
    assert found[0.0] == 0 and found[0.3] > 0.01


def _trained(method: str, options: dict[str, Any], statistic: str, steps: int) -> float:
    """Mean of a statistic over the last third of so many steps."""
    engine = _engine(Case("llama", method, options, {"num_layers": 1}), disturbed=False)
    trained = [p for p in engine.stage.parameters() if p.requires_grad]
    optimizer, values = torch.optim.Adam(trained, lr=3e-3), []
    for step in range(steps):
        engine.zero_grad()
        out = engine.forward_backward([_batch(step, rows=8)], step, train=True)
        for p in trained:
            p.grad = p.main_grad.clone()  # type: ignore[attr-defined]
        optimizer.step()
        engine.settle(out, step)
        values.append(out.stats[statistic])
    last = values[-(steps // 3) :]
    return sum(last) / len(last)


@pytest.mark.parametrize(
    ("method", "options"),
    [("ponderlm3", {"latents": 2, "jacobi": 1}), ("adaptive_cot", {}), ("confident_ponderlm", {})],
)
def test_depth_follows_the_target(method: str, options: dict[str, Any]) -> None:
    depths = [_trained(method, options | {"target": t}, "wanted_depth", 15) for t in (0.4, 0.6, 0.8)]
    assert depths[0] < depths[1] < depths[2]


@pytest.mark.parametrize(
    ("method", "options", "weights", "statistic"),
    [
        ("ponderlm3", {"latents": 2, "target": 0.0, "jacobi": 1}, (0.0, 0.1, 1.0), "expected_depth"),
        ("adaptive_cot", {"target": 0.0, "threshold": 0.5}, (0.0, 10.0, 100.0), "depth"),
    ],
)
def test_depth_follows_the_cost(
    method: str, options: dict[str, Any], weights: tuple[float, ...], statistic: str
) -> None:
    depths = [_trained(method, options | {"cost_weight": w}, statistic, 30) for w in weights]
    assert depths[0] > depths[1] > depths[2]
