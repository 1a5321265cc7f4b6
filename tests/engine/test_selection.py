"""Which tokens are selected: against the conditional value at risk in its other form, and at its edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaponder.config.eslm import Eslm
from megaponder.engine import cuda_on_cpu
from tests.layouts.cases import CASES, Case, disturb, run_config
from tests.layouts.layouts import LAYOUTS
from tests.oracles.eslm import weights as plain
from tests.tolerance import RTOL

cuda_on_cpu.install()

from megaponder.engine import groups  # noqa: E402
from megaponder.engine.build import build_engine  # noqa: E402
from megaponder.engine.selection import Selection  # noqa: E402
from megaponder.ponder.settings import method_of  # noqa: E402
from tests.layouts.workers import batches  # noqa: E402

ONE = LAYOUTS["one-batch1"]


def selection(alpha: float) -> Selection:
    return Selection(Eslm("loss", alpha), groups.init(run_config(CASES["vanilla-pythia"], ONE)))


def drawn(n: int, seed: int) -> Tensor:
    return torch.rand(n, 1, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize(("n", "alpha"), [(10, 0.3), (100, 0.29), (64, 0.5), (30, 0.1)])
def test_selected_losses_are_the_conditional_value_at_risk(n: int, alpha: float) -> None:
    """min over eta of eta + E[(l - eta)+] / (1 - alpha), which is attained at one of the losses."""
    losses, mask = drawn(n, n), torch.ones(n, 1)
    weights = selection(alpha).weigh(losses, mask).weights_nb
    exact = losses.double()
    tails = [float(eta + (exact - eta).clamp(min=0).mean() / (1 - alpha)) for eta in exact[:, 0]]
    assert float((weights * losses).mean()) == pytest.approx(min(tails), rel=RTOL)
    assert int((weights > 0).sum()) == n - round(alpha * n)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.33, 0.5, 0.999])
def test_shares_masks_and_the_plain_form(alpha: float) -> None:
    for n in (1, 2, 7, 50):
        losses, mask = drawn(n, 3), (drawn(n, 4) > 1.5).float()
        losses[mask == 0] = 1e3  # high scores that do not count
        weights = selection(alpha).weigh(losses, mask).weights_nb
        torch.testing.assert_close(weights, plain(losses, mask, alpha).float(), rtol=RTOL, atol=0)
        count = float(mask.sum())
        assert bool((weights[mask == 0] == 0).all()) and bool(weights.isfinite().all())
        assert abs(float((weights > 0).sum()) - (1 - alpha) * count) < 1 or count == 0
        assert float(weights.sum()) == pytest.approx(count, rel=RTOL)
        if alpha == 0:
            assert torch.equal(weights, mask)


def test_equal_scores_are_all_kept() -> None:
    losses, mask = torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0, 3.0])[:, None], torch.ones(6, 1)
    assert (selection(0.5).weigh(losses, mask).weights_nb > 0)[:, 0].tolist() == [False, *[True] * 5]
    assert bool((selection(0.9).weigh(torch.ones(6, 1), mask).weights_nb == 1).all())


def engine_of(case: Case) -> Any:
    cfg = run_config(case, ONE)
    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    disturb(engine.stage.named_parameters())
    return engine


@pytest.mark.parametrize("scope", ["micro", "global"])
def test_without_a_share_to_leave_out_it_is_the_plain_loss(scope: str) -> None:
    """Bit by bit, as in a warm-up; and neither evaluation nor the reported loss ever selects."""
    plain_case, found = replace(CASES["eslm-entropy-losses"], eslm={}), []
    engines = [engine_of(plain_case), engine_of(replace(plain_case, eslm={"by": "entropy", "scope": scope}))]
    engines[1].stage.selection.set_alpha(0.0)
    for engine in engines:
        engine.zero_grad()
        out = engine.forward_backward(batches(ONE, 0), 0, train=True)
        grads = {n: p.main_grad.clone() for n, p in engine.stage.named_parameters()}
        found.append((out.loss, grads, engine.forward_backward(batches(ONE, 0), 0, train=False).loss))
    (loss, grads, seen), (same_loss, same_grads, same_seen) = found
    assert loss == same_loss and seen == same_seen
    assert all(torch.equal(grad, same_grads[name]) for name, grad in grads.items())
    engines[1].stage.selection.set_alpha(0.5)
    engines[1].zero_grad()
    out = engines[1].forward_backward(batches(ONE, 0), 0, train=True)
    assert out.loss == loss and out.selected["selected_loss"] != pytest.approx(loss, rel=0.01)
    assert engines[1].forward_backward(batches(ONE, 0), 0, train=False).loss == seen
    assert any(not torch.equal(p.main_grad, grads[n]) for n, p in engines[1].stage.named_parameters())


def test_the_forward_for_scores_loads_no_expert() -> None:
    """The loads that experts' biases follow are those of one forward, with selection as without."""
    name = next(name for name, case in CASES.items() if case.model.get("moe"))
    found = []
    for given in ({}, {"by": "loss", "alpha": 0.3, "scope": "global"}):
        engine = engine_of(replace(CASES[name], eslm=given))
        engine.zero_grad()
        found.append(engine.forward_backward(batches(ONE, 0), 0, train=True))
    assert found[0].balance and found[1].balance == pytest.approx(found[0].balance, rel=RTOL)
    assert found[1].loss == found[0].loss and found[1].selected["selected_share"] < 0.8
