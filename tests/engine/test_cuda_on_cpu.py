"""What the CPU backend puts in megatron-core's place."""

from __future__ import annotations

import pytest
import torch

from megaponder.engine import cuda_on_cpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU backend is not in force where there is a GPU")
def test_gradient_norms_of_large_tensors_are_exact() -> None:
    cuda_on_cpu.install()
    from megatron.core.optimizer import clip_grads

    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(50304, 64, generator=draw) * 1e-4, torch.randn(7, generator=draw)]
    exact = sum(t.double().square().sum() for t in tensors) ** 0.5
    norm, _ = clip_grads.l2_norm_impl(None, None, [tensors], False)
    assert float(norm) == pytest.approx(float(exact), rel=1e-6)
