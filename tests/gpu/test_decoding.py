"""Depth-wise batching on a GPU: captured and compiled steps write the text of eager ones; FP8 layers are near BF16."""

from __future__ import annotations

import pytest
import torch

from megaponder.inference.batching import DepthBatch
from megaponder.inference.fp8 import Linear8
from tests.export import models
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
    for compiled in (False, True):
        batch = DepthBatch(net, rows=4, tokens=40, compiled=compiled)
        assert batch.run(prompts(), NEW) == want
        assert batch.counts.graphs > 0


def test_fp8_layers() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 128).cuda().bfloat16()
    for rows in (1, 7, 32):
        x = torch.randn(1, rows, 256, device="cuda", dtype=torch.bfloat16)
        want = linear(x)
        assert (Linear8(linear)(x) - want).norm() < 0.05 * want.norm()
