"""Fused chains: derivatives in float64; and kernels of a GPU against the same functions on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaponder.backbone import fused, row_kernels
from megaponder.engine.active_rows import Rows
from tests.tolerance import ATOL, RTOL

S, B = 7, 3


def _leaf(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()


def _turn(rotated: int) -> Tensor:
    return fused.turns(_leaf(S, 1, 1, rotated // 2).detach().repeat(1, 1, 1, 2))


def _rows() -> Rows:
    return Rows(torch.rand(S, B, generator=torch.Generator().manual_seed(1)) < 0.5)


Case = tuple[Callable[..., Tensor | tuple[Tensor, ...]], tuple[Tensor, ...], tuple[object, ...]]
"""A function, its inputs that have gradients, its other arguments."""


def _cases() -> dict[str, Case]:
    rows = _rows()
    index = (rows.index, rows._inverse)
    few, all_ = _leaf(rows.places, B, 2, 4, seed=1), _leaf(S, B, 2, 4)
    return {
        "gelu": (fused.gelu, (_leaf(S, B, 8), _leaf(8)), ()),
        "gelu_tanh": (fused.gelu_tanh, (_leaf(S, B, 8), _leaf(8)), ()),
        "swiglu": (fused.swiglu, (_leaf(S, B, 8),), ()),
        "add_biased": (fused.add_biased, (_leaf(S, B, 8), _leaf(S, B, 8, seed=1), _leaf(8)), ()),
        "thrice": (fused.thrice, (_leaf(S, B, 8),), ()),
        "rope": (fused.split_rotated, (_leaf(S, B, 8 * 8),), (_turn(8), 4, 2)),
        "rope of a part": (fused.split_rotated, (_leaf(S, B, 6 * 8),), (_turn(4), 2, 2)),
        "only": (
            lambda new, old, active: row_kernels.only(active, new, old),
            (all_, _leaf(S, B, 2, 4, seed=2)),
            (rows.active,),
        ),
        "gather_rows": (row_kernels.gather_rows, (all_,), index),
        "scatter_rows": (row_kernels.scatter_rows, (few, all_), (*index, rows.active)),
        "scatter_rows among zeros": (row_kernels.scatter_rows, (few,), (None, *index, rows.active)),
    }


CASES = _cases()


@pytest.mark.parametrize("name", CASES)
def test_derivatives(name: str) -> None:
    function, leaves, rest = CASES[name]
    assert torch.autograd.gradcheck(lambda *x: function(*x, *rest), leaves, fast_mode=True)


def _run(name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Outputs, then gradients."""
    function, leaves, rest = CASES[name]
    inputs = [x.detach().to(device, dtype).requires_grad_() for x in leaves]
    out = function(*inputs, *(x.to(device) if isinstance(x, Tensor) else x for x in rest))
    outs = [out] if isinstance(out, Tensor) else list(out)
    grads = torch.autograd.grad(sum((o.float() * (i + 1)).square().sum() for i, o in enumerate(outs)), inputs)
    return [x.detach().double().cpu() for x in (*outs, *grads)]


def _check_on_gpu(name: str, dtype: torch.dtype) -> None:
    """FP32 within the suite's tolerance; BF16 within two roundings of the largest value."""
    got, expected = _run(name, "cuda", dtype), _run(name, "cpu", torch.float64)
    for x, y in zip(got, expected, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(x, y, rtol=RTOL, atol=ATOL)
        else:
            assert (x - y).abs().max() <= 2**-6 * y.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_gpu_kernels(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", None)
    _check_on_gpu(name, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_with_transformer_engine(dtype: torch.dtype) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    assert sys.modules["transformer_engine_torch"]
    _check_on_gpu("swiglu", dtype)


def test_bf16_gelu_is_as_good_as_a_library_s() -> None:
    """Every BF16 value below 1e4: GELU and its derivative within rounding of the exact ones."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() < 1e4)][:, None].requires_grad_()
    out = fused.gelu_bf16(x, torch.zeros(1, dtype=x.dtype))
    (grad,) = torch.autograd.grad(out.sum(), x)
    wide = x.detach().double().requires_grad_()
    exact = F.gelu(wide)
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    assert torch.all((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6)
    assert torch.all((grad.double() - slope).abs() <= 2**-8 * slope.abs() + 1e-6)
