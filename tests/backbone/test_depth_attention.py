"""Depth-Attention's mix: its derivatives, its cases in closed form, and what it must not depend on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megaponder.backbone import depth_attention as training
from megaponder.backbone import fused
from megaponder.decoding import depth_attention, depth_sources
from megaponder.decoding.depth_sources import DepthAttention

HEADS, GROUPS, SIZE = 4, 2, 4
BOTH = itertools.product(depth_sources.CHOICES["query"], depth_sources.CHOICES["own"])
FORMS = [DepthAttention(query=query, own=own, scale=i / 3) for i, (query, own) in enumerate(BOTH)]


def tensors(sources: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and `sources` keys and values in turn."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [HEADS, *[GROUPS] * (2 + 2 * sources)]
    return [torch.randn(3, 2, n, SIZE, generator=draw, dtype=dtype).requires_grad_() for n in shapes]


def mixed(form: DepthAttention, q: Any, k: Any, v: Any, *sources: Any) -> torch.Tensor:
    return training.mix(form, q, k, v, sources)[0]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.query}-{f.own}")
def test_its_derivatives_and_the_decoding_form(form: DepthAttention) -> None:
    given = tensors(2)
    few = [x.detach()[:1].requires_grad_() for x in given]
    assert torch.autograd.gradcheck(lambda *x: mixed(form, *x), few)
    found, turned = mixed(form, *given), [x.transpose(1, 2) for x in given]
    other = depth_attention.mix(form, *turned[:3], turned[3:]).transpose(1, 2)
    torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-12)
    assert mixed(form, *given[:3]) is given[2], "the first layer is the plain one"


def test_equal_keys_weigh_all_layers_alike() -> None:
    q, k, v, _, w, _, x = tensors(2)
    assert torch.allclose(mixed(DepthAttention(), q, k, v, k, w, k, x), (v + w + x) / 3)
    assert torch.allclose(mixed(DepthAttention(own="residual"), q, k, v, k, w, k, x), v + (w + x) / 2)


def test_a_rotation_that_all_layers_share_changes_nothing() -> None:
    """So it does not matter that scores are made after RoPE."""
    q, k, v, j, w = tensors(1)
    angles = torch.randn(3, 1, 1, SIZE // 2, dtype=torch.float64)
    turn = fused.turns(torch.cat([angles, angles], dim=-1))
    q2, k2, j2 = (fused.rotated(x, turn) for x in (q, k, j))
    assert torch.allclose(mixed(DepthAttention(), q, k, v, j, w), mixed(DepthAttention(), q2, k2, v, j2, w), rtol=1e-12)
    assert not torch.allclose(mixed(DepthAttention(), q, k, v, j, w), mixed(DepthAttention(), q2, k2, v, j, w))


def test_tokens_mix_by_themselves_in_bf16_too() -> None:
    given = [x.detach().bfloat16() for x in tensors(3)]
    found = mixed(DepthAttention(), *given)
    exact = mixed(DepthAttention(), *(x.double() for x in given))
    assert found.dtype is torch.bfloat16
    assert (found - exact).abs().max() < 2**-8 * exact.abs().max()
    given[1][1], given[3][1], given[4][1] = 9.0, -9.0, 9.0
    again = mixed(DepthAttention(), *given)
    assert torch.equal(again[0], found[0]) and torch.equal(again[2], found[2]) and not torch.equal(again[1], found[1])


@pytest.mark.parametrize(
    ("form", "parts", "expected"),
    [
        ({"sources": "all"}, [None, None], [[[], [0], [0, 1]], [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]]),
        ({"sources": "last:2", "passes": "within"}, [None, None], 2 * [[[], [0], [0, 1]]]),
        ({"sources": "last:2"}, [(0, 2), (1, 3)], [[[], [0]], [[0, 1], [1, 2]]]),
        ({"sources": "stride:2"}, [None, None], [[[], [], [0]], [[1], [0, 2], [1, 3]]]),
        ({"sources": [0, 2]}, [None, None], [[[], [0], [0]], [[0, 2], [0, 2, 3], [0, 2, 3]]]),
        ({"blocks": 3, "passes": "within"}, [None], [[[], [], []]]),
    ],
)
def test_which_layers_are_sources(form: dict[str, Any], parts: list[Any], expected: list[Any]) -> None:
    """By the number of a layer in the order of computation."""
    feature = depth_sources.read(form)
    assert feature is not None
    number, earlier, found = itertools.count(), [], []
    for part in parts:
        if feature.passes == "within":
            number, earlier = itertools.count(), []
        found.append([])
        for layer in range(*(part or (0, 3))):
            found[-1].append(feature.of(earlier))
            earlier = feature.after(earlier, next(number), layer, 3)
    assert found == expected
    assert list(depth_sources.counted(feature, 3, parts)) == [[len(x) for x in one] for one in expected]


def test_off_is_nothing() -> None:
    assert depth_sources.read({}) is None and depth_sources.read(None) is None
    with pytest.raises(ValueError, match="has no"):
        depth_sources.read({"source": "all"})
