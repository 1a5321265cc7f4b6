"""Depth-Attention's kernels against its plain form: values and gradients of several layers that follow one another."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from megaponder.backbone import depth_attention
from megaponder.decoding.depth_sources import DepthAttention
from tests.tolerance import ATOL, RTOL

FORMS = [
    DepthAttention(sources=sources, own=own, values=values, scale=0.4)
    for sources, own, values in product(("all", "last:2"), ("softmax", "residual"), ("mixed", "raw"))
]
LAYERS = 6


def run(form: DepthAttention, fused: bool, device: str, dtype: torch.dtype, d: int) -> list[torch.Tensor]:
    """What each layer mixes, then the gradients of each layer's q, k and v."""
    draw = torch.Generator().manual_seed(1)
    given = [
        [torch.randn(5, 2, n, d, generator=draw).to(device, dtype).requires_grad_() for n in (6, 2, 2)]
        for _ in range(LAYERS)
    ]
    entries, outs = [], []
    for i, (q, k, v) in enumerate(given):
        picked = form.of(range(len(entries)))
        u, *passed = depth_attention.mix(form, q, k, v, [x for j in picked for x in entries[j]], fused)
        for j, entry in zip(picked, zip(passed[0::2], passed[1::2], strict=True), strict=True):
            entries[j] = entry
        entries = form.after(entries, (k, v if form.values == "raw" else u), i, LAYERS)
        outs.append(u)
    # attention reads keys and mixed values as well
    read = enumerate(zip(outs, given, strict=True), start=1)
    sum((i * u.float() + k.float()).sin().sum() for i, (u, (_, k, _)) in read).backward()
    return [x.detach() for x in outs] + [x.grad for one in given for x in one if x.grad is not None]


def compare(device: str) -> None:
    for form, (dtype, d) in product(FORMS, ((torch.float32, 8), (torch.float32, 6))):
        plain, fused = (run(form, how, device, dtype, d) for how in (False, True))
        assert len(plain) == len(fused) > 4 * LAYERS - 6
        for a, b in zip(plain, fused, strict=True):
            torch.testing.assert_close(b, a, rtol=RTOL, atol=max(ATOL, RTOL * float(a.abs().max())))


def test_interpreted_kernels_compute_what_the_plain_form_does() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    code = "from tests.backbone.test_depth_attention_kernel import compare; compare('cpu')"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_kernels_compute_what_the_plain_form_does() -> None:
    compare("cuda")
    for form in FORMS:  # as near to FP32 as the plain form is
        exact = run(form, False, "cuda", torch.float32, 64)
        plain, fused = (run(form, how, "cuda", torch.bfloat16, 64) for how in (False, True))
        for want, a, b in zip(exact, plain, fused, strict=True):
            wrong, worst = ((x.float() - want).norm() for x in (b, a))
            # the query of the first layer has one source and so no gradient: its norm is 0
            assert wrong < 2 * worst + 2**-9 * want.norm().clamp_min(1)
