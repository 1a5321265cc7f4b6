"""Kernels for one row and for attention by slots, against plain products and softmax in float64.

They run where there is a GPU (`pytest -m gpu`), or by Triton's interpreter:

    TRITON_INTERPRET=1 pytest tests/inference/test_kernels.py
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megaponder.decoding.backbone import rotate
from megaponder.inference.batching import Pages
from megaponder.inference.fp8 import LARGEST
from megaponder.inference.one_row import OneRow, Stack
from tests.export import models
from tests.tolerance import ATOL, RTOL

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (INTERPRETED or DEVICE == "cuda"),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1",
)


def check(got: Tensor, want: Tensor) -> None:
    """Equal in FP32."""
    torch.testing.assert_close(got.double(), want, rtol=RTOL, atol=ATOL)


@needs_triton
@pytest.mark.parametrize(("outputs", "inputs"), [(6, 40), (10, 2100)])
def test_products_with_one_row(outputs: int, inputs: int) -> None:
    from megaponder.inference.kernels import product

    torch.manual_seed(0)
    x, gain, w = (torch.randn(n, device=DEVICE) for n in ((inputs,), (inputs,), (2 * outputs, inputs)))
    w /= inputs**0.5
    rest, y, wide = torch.randn(outputs, device=DEVICE), x.double(), w.double()
    check(product(x, w[:outputs], rest=rest), wide[:outputs] @ y + rest.double())
    normed = gain.double() * y * torch.rsqrt(y.square().mean() + 0.1)
    check(product(x, w[:outputs], gain=gain, eps=0.1), wide[:outputs] @ normed)
    first, second = (wide @ normed).chunk(2)
    check(product(x, w, gain=gain, eps=0.1, gated=True), F.silu(first) * second)
    if DEVICE == "cuda":  # the interpreter has no FP8
        scale = w.abs().amax(1) / LARGEST
        small = (w / scale[:, None]).to(torch.float8_e4m3fn)
        first, second = (small.double() * scale.double()[:, None] @ normed).chunk(2)
        check(product(x, small, scale, gain=gain, eps=0.1, gated=True), F.silu(first) * second)


@needs_triton
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "size", "keys", "turned", "adjacent"),
    [(1, 4, 2, 8, 20, 8, False), (2, 2, 2, 12, 300, 8, True), (3, 2, 1, 4, 9, 0, False)],
)
def test_attention_by_slots(
    rows: int, heads: int, groups: int, size: int, keys: int, turned: int, adjacent: bool
) -> None:
    from megaponder.inference.kernels import attention

    torch.manual_seed(0)
    pool = [torch.randn(2400, groups, size, device=DEVICE) for _ in range(2)]
    made = torch.randn(rows, (heads + 2 * groups) * size, device=DEVICE)
    q, k, v = (x.unflatten(1, (-1, size)) for x in made.split([n * size for n in (heads, groups, groups)], 1))
    found = torch.randperm(2400, device=DEVICE)[: rows * keys].view(rows, keys)
    mask = torch.rand(rows, keys, device=DEVICE) < 0.7
    slot = found[:, -1].clone()
    mask[:, -1] = True
    tables = None
    if turned:
        angle = torch.randn(rows, turned // 2, device=DEVICE)
        cos, sin = angle.cos(), angle.sin()
        tables = (cos.repeat_interleave(2, 1), torch.stack([-sin, sin], 2).flatten(1))
        if not adjacent:
            tables = (torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1))
    want = [x.double() for x in pool]

    def turn(x: Tensor) -> Tensor:
        if tables is None:
            return x.double()
        cos, sin = (table.double()[None, :, None] for table in tables)
        return rotate(x.double()[None], (cos, sin), adjacent)[0]

    want[0][slot], want[1][slot] = turn(k), v.double()
    got = attention(q, k, v, *pool, slot, found, mask, tables, adjacent)
    for mine, theirs in zip(pool, want, strict=True):
        check(mine, theirs)
    for i in range(rows):
        keys_of, values_of = (x[found[i][mask[i]]].repeat_interleave(heads // groups, 1) for x in want)
        shares = (torch.einsum("hd,khd->hk", turn(q)[i], keys_of) * size**-0.5).softmax(-1)
        check(got[i], torch.einsum("hk,khd->hd", shares, values_of))


def stacked(net: Any, kernels: bool, rows: int) -> list[Tensor]:
    """What a step makes of rows, and the keys and values that it leaves."""
    torch.manual_seed(1)
    slots = Pages(net, rows, 2, 16, 8, False, 0)
    for held in (*slots.keys, *slots.values):
        held.copy_(torch.randn(held.shape))
    x = torch.randn(rows, net.config.hidden_size).to(DEVICE, net.dtype)
    at = torch.arange(3, 3 + rows, device=DEVICE)
    found = torch.randperm(len(slots.keys[0]))[: rows * 9].view(rows, 9).to(DEVICE)
    mask = (torch.rand(rows, 9) < 0.7).to(DEVICE)
    mask[:, 4] = True
    out = Stack(net, False, kernels)(x, at, slots, found[:, 4].clone(), found, mask)
    return [out, *slots.keys, *slots.values]


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
def test_layers_by_kernels(rows: int) -> None:
    net = models.model("llama", "loop").to(DEVICE)
    want = stacked(net.double(), False, rows)
    net = net.float()
    assert OneRow.fits(net.model)
    for _ in range(2):  # joined weights are joined again
        for got, theirs in zip(stacked(net, True, rows), want, strict=True):
            check(got, theirs)


def test_layers_that_fit() -> None:
    assert OneRow.fits(models.model("llama", "loop").model)
    for family, more in (("pythia", {}), ("gpt2", {}), ("llama", {"qk_norm": "head"}), ("llama", {"mlp_bias": True})):
        assert not OneRow.fits(models.model(family, "loop", **more).model)


def test_joined_weights_are_not_held_twice() -> None:
    net = models.model("llama", "loop")
    before = {name: x.clone() for name, x in net.state_dict().items()}
    rows = OneRow(net.model)
    assert all(torch.equal(before[name], x) for name, x in net.state_dict().items())
    attention = net.model.layers[1].self_attn
    whole = rows.matrices[1][0].weight
    assert attention.k_proj.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert torch.equal(whole, torch.cat([x.weight for x in (attention.q_proj, attention.k_proj, attention.v_proj)]))
    assert rows.current()
    net.double()
    assert not rows.current()
