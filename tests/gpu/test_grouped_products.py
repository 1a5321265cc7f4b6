"""Transformer Engine's one kernel for the products of all experts, which `backbone.moe` asks for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

ROWS = (0, 5, 256, 0, 1, 130)
"""Of each expert: none, few, not a multiple of a tile."""


def test_experts_with_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    torch.manual_seed(0)
    layer = te.GroupedLinear(len(ROWS), 256, 384, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x_rh = torch.randn(sum(ROWS), 256, device="cuda", dtype=torch.bfloat16)
    upstream_ro = torch.randn(sum(ROWS), 384, device="cuda", dtype=torch.bfloat16)
    weights = [getattr(layer, f"weight{i}") for i in range(len(ROWS))]

    def run(kernel: str) -> list[Tensor]:
        monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", kernel)
        x = x_rh.clone().requires_grad_()
        out = layer(x, list(ROWS))
        out.backward(upstream_ro)
        grads = [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in weights]
        layer.zero_grad(set_to_none=True)
        assert x.grad is not None
        return [out.detach(), x.grad, *grads]

    parts, upstream = x_rh.double().split(list(ROWS)), upstream_ro.double().split(list(ROWS))
    exact = [
        torch.cat([p @ w.double().t() for p, w in zip(parts, weights, strict=True)]),
        torch.cat([u @ w.double() for u, w in zip(upstream, weights, strict=True)]),
        *(u.t() @ p for u, p in zip(upstream, parts, strict=True)),
    ]
    for kernel in ("1", "0"):
        for got, wanted in zip(run(kernel), exact, strict=True):
            assert (got.double() - wanted).norm() <= 4e-3 * wanted.norm()  # BF16 keeps 8 bits
