"""The parts that adaptive methods share."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaponder.engine import depth
from megaponder.engine.message import pack, rider_width, unpack
from megaponder.errors import ConfigError
from megaponder.ponder.base import Flow, Shape
from megaponder.ponder.halting import ramp, smallest
from megaponder.ponder.methods.ponderlm3.training import log_tails
from megaponder.ponder.methods.pruned_ponderlm.training import fixed_depth
from megaponder.ponder.registry import build_method

SHAPE = Shape("llama", 2, 32)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), passes=st.integers(1, 4), n=st.integers(1, 9))
def test_smallest_takes_the_smallest_share_of_each_sequence(seed: int, share: float, passes: int, n: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 5, (passes, n, 3), generator=draw).float()  # with ties
    mask = torch.rand(passes, n, 3, generator=draw) < 0.7
    chosen, count = smallest(values, mask, share)
    assert not (chosen & ~mask).any()
    for b in range(3):
        of = int(mask[..., b].sum())
        assert int(chosen[..., b].sum()) == int(count[b]) == math.ceil(share * of)
        rest = values[..., b][mask[..., b] & ~chosen[..., b]]
        if count[b] and len(rest):
            assert values[..., b][chosen[..., b]].max() <= rest.min()


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), passes=st.integers(1, 3), n=st.integers(1, 9))
def test_smallest_of_each_document_is_that_of_the_document_alone(seed: int, share: float, passes: int, n: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 5, (passes, n, 2), generator=draw).float()  # with ties
    mask = torch.rand(passes, n, 2, generator=draw) < 0.7
    begins = torch.rand(n, 2, generator=draw) < 0.4
    starts = torch.where(begins, torch.arange(n)[:, None], 0).cummax(0).values
    chosen, count = smallest(values, mask, share, starts)
    for b in range(2):
        for first in set(starts[:, b].tolist()):
            own = starts[:, b] == first
            alone, number = smallest(values[:, own, b, None], mask[:, own, b, None], share)
            assert torch.equal(chosen[:, own, b], alone[..., 0]) and bool((count[own, b] == number).all())


def test_ramp() -> None:
    def at(step: int) -> Tensor:
        return torch.tensor(float(step), dtype=torch.float64)

    assert [float(ramp(at(s), 10, 20)) for s in (0, 10, 15, 20, 99)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert ramp(None, 10, 20) == 1.0 and ramp(at(0), 0, 0) == 1.0
    assert [float(ramp(at(s), 7, 7)) for s in (6, 7)] == [0.0, 1.0]


def test_log_tails_are_exact_and_fall() -> None:
    a = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 8
    s = a.double().softmax(-1)
    expected = torch.stack([s[:, k:].sum(-1) for k in range(4)], dim=1).log()
    assert torch.equal(log_tails(a)[:, 0], torch.zeros(50))
    assert torch.allclose(log_tails(a).double(), expected, rtol=1e-5, atol=1e-5)
    assert (log_tails(a).diff(dim=-1) <= 0).all()


def test_riders_cross_a_bf16_message_without_rounding_and_so_do_their_gradients() -> None:
    draw = torch.Generator().manual_seed(1)
    riders = (torch.randn(5, 2, 3, generator=draw) * torch.tensor([1e-6, 1.0, 3e4])).requires_grad_()
    rows = torch.randn(5, 2, 16, generator=draw).bfloat16().requires_grad_()
    message = pack(Flow(rows, riders))
    assert message.shape[-1] == 16 + rider_width(3, torch.bfloat16) and message.dtype == torch.bfloat16
    back = unpack(message, 3)
    assert back.riders is not None and torch.equal(back.riders, riders) and torch.equal(back.rows, rows)
    grad = torch.randn(5, 2, 3, generator=draw)
    # one backward per side, as in a pipeline: the gradient itself crosses as BF16 too
    (of_message,) = torch.autograd.grad(back.riders, message, grad, retain_graph=True)
    (of_riders,) = torch.autograd.grad(message, riders, of_message)
    assert torch.equal(of_riders, grad)


@pytest.mark.parametrize("by", ["random", "position"])
@pytest.mark.parametrize("mean", [1.0, 2.3, 3.7, 4.0])
def test_fixed_depth_has_its_mean(by: str, mean: float) -> None:
    passes = fixed_depth(torch.arange(20000), mean, by, seed=3)
    assert passes.min() >= math.floor(mean) and passes.max() <= math.ceil(mean)
    assert float(passes.double().mean()) == pytest.approx(mean, abs=0.01)


def test_random_passes_are_drawn_from_seed_and_step_alone() -> None:
    method = build_method("ponderlm2", {"jacobi": 3, "jacobi_from": 2, "jacobi_to": 4}, SHAPE)
    counts = [len(method.passes(5, step)) for step in range(200)]
    assert set(counts) == {4, 5, 6}  # one growing pass, 2 to 4 refinements, one final pass
    assert counts == [len(method.passes(5, step)) for step in range(200)]
    assert counts != [len(method.passes(6, step)) for step in range(200)]
    assert len(method.passes(5, None)) == 5  # evaluation: jacobi = 3


@pytest.mark.parametrize(
    ("method", "options", "field"),
    [
        ("ponderlm2", {"latents": 0}, "latents"),
        ("ponderlm2", {"jacobi_from": 3, "jacobi_to": 2}, "jacobi_to"),
        ("ponderlm3", {"target": 0.0, "threshold": 1.5}, "threshold"),
        ("ponderlm3", {"target": 0.0, "ramp_start": 9, "ramp_end": 3}, "ramp_end"),
        ("adaponderlm", {"target": 0.0, "bottom_share": -0.1}, "bottom_share"),
        ("adaponderlm", {"target": 0.0, "cost_on": "gate"}, "cost_on"),
        ("adaptive_cot", {"steps": 0, "target": 0.0}, "steps"),
        ("adaptive_cot", {"target": 0.0, "cost_power": -1.0}, "cost_power"),
        ("pruned_ponderlm", {"depth": 9.0}, "depth"),
        ("pruned_ponderlm", {"by": "luck"}, "by"),
        ("confident_ponderlm", {"target": 0.0, "threshold": 2.0}, "threshold"),
    ],
)
def test_bad_options_are_refused_by_name(method: str, options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"ponder.options.{field}"):
        build_method(method, options, SHAPE)


def test_metrics_of_a_known_batch() -> None:
    depths = torch.tensor([[1.0], [2.0], [3.0], [3.0]])
    nll, valid = torch.tensor([[1.0], [2.0], [3.0], [9.0]]), torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    gates = [(torch.tensor([[0.05], [0.5], [1.0], [0.5]]), torch.ones(4, 1, dtype=torch.bool))]
    means = {k: float(v) / 3 for k, v in depth.sums(depths, nll, valid, gates, 3).items()}
    got = depth.metrics(means, loss=2.0)
    assert got["mean_depth"] == pytest.approx(2.0) and got["depth_nll_correlation"] == pytest.approx(1.0)
    assert depth.active_shares(got) == pytest.approx([1.0, 2 / 3, 1 / 3])
    assert got["kv_reuse"] == pytest.approx(0.5)
    bins = [got[f"gate0_bin{b}"] for b in (0, 5, 9)]
    assert bins == pytest.approx([1 / 3] * 3)
    assert depth.collapse_warning(got) is None


@pytest.mark.parametrize(("at", "word"), [(1, "halt at the same pass"), (3, "never halt")])
def test_collapse_is_named(at: int, word: str) -> None:
    depths = torch.full((100, 1), float(at))
    ones = torch.ones(100, 1)
    got = depth.metrics({k: float(v) / 100 for k, v in depth.sums(depths, ones, ones, [], 3).items()}, loss=1.0)
    warning = depth.collapse_warning(got)
    assert got["collapsed"] == 1.0 and warning is not None and word in warning
