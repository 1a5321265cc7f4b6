"""Depth-wise batching on a GPU: captured and compiled steps write the text of eager ones; FP8 layers are near BF16."""

from __future__ import annotations

import pytest
import torch

from megaponder.inference.batching import DepthBatch
from megaponder.inference.fp8 import Linear8
from tests.export import models
from tests.inference import test_kernels
from tests.inference.test_batching import METHODS, NEW, prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("method", "budget"),
    [("loop", 0), ("adaponderlm", 0), ("adaptive_cot", 0), ("pruned_ponderlm", 0), ("ouro", 0), ("ouro", 2)],
)
def test_captured_steps_write_the_same_text(method: str, budget: int) -> None:
    more = {"kv_budget": budget} if budget else {}
    net = models.model("llama", method, method_options=METHODS[method] | more)
    want = DepthBatch(net, rows=4, tokens=40).run(prompts(), NEW)
    net = net.cuda()
    for compiled, kernels, rows in ((False, False, 4), (True, False, 4), (True, True, 4), (True, True, 1)):
        batch = DepthBatch(net, rows=rows, tokens=40, compiled=compiled, kernels=kernels)
        assert batch.run(prompts(), NEW) == want, (compiled, kernels, rows)
        assert batch.counts.graphs > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_layers_by_kernels(rows: int) -> None:
    test_kernels.test_layers_by_kernels(rows)


@pytest.mark.parametrize(("outputs", "inputs"), [(6, 40), (10, 2100), (130, 4096)])
def test_products_with_one_row(outputs: int, inputs: int) -> None:
    test_kernels.test_products_with_one_row(outputs, inputs)


@pytest.mark.parametrize(
    "case", [(1, 4, 2, 64, 700, 64, False), (2, 2, 2, 128, 300, 64, True), (3, 2, 1, 12, 9, 0, False)]
)
def test_attention_by_slots(case: tuple[int, int, int, int, int, int, bool]) -> None:
    test_kernels.test_attention_by_slots(*case)


def test_fp8_layers() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 128).cuda().bfloat16()
    for rows in (1, 7, 32):
        x = torch.randn(1, rows, 256, device="cuda", dtype=torch.bfloat16)
        want = linear(x)
        assert (Linear8(linear)(x) - want).norm() < 0.05 * want.norm()
