"""What the CPU backend puts in megatron-core's place."""

from __future__ import annotations

import pytest
import torch

from megaponder.engine import cuda_on_cpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU backend is not in force where there is a GPU"
)


def test_tensors_for_a_gpu_are_on_the_cpu_and_other_devices_as_asked() -> None:
    cuda_on_cpu.install()
    made = [torch.tensor([1.0], device=0, pin_memory=True), torch.empty(2, device="cuda"), torch.ones(1).cuda()]
    made += [made[0].to(device="cuda:1"), made[0].new_zeros(3, device=torch.device("cuda")), torch.ones_like(made[0])]
    assert {t.device.type for t in made} == {"cpu"}
    assert made[0].type() == "torch.cuda.FloatTensor" and made[0].type("torch.IntTensor").dtype == torch.int32
    with torch.device("meta"):
        assert torch.empty(2).is_meta and torch.tensor([1]).is_meta and not torch.zeros(1, device="cpu").is_meta
    assert torch.zeros(1, device="meta").is_meta and torch.empty(2).to(device="meta").is_meta


def three(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1) + x.new_zeros(1) + torch.tensor([1.0]) + torch.full([1], 2.0)


def test_functions_can_be_scripted() -> None:
    cuda_on_cpu.install()
    assert float(torch.jit.script(three)(torch.ones(1))) == 3


def test_gradient_norms_of_large_tensors_are_exact() -> None:
    cuda_on_cpu.install()
    from megatron.core.optimizer import clip_grads

    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(50304, 64, generator=draw) * 1e-4, torch.randn(7, generator=draw)]
    exact = sum(t.double().square().sum() for t in tensors) ** 0.5
    norm, _ = clip_grads.l2_norm_impl(None, None, [tensors], False)
    assert float(norm) == pytest.approx(float(exact), rel=1e-6)
