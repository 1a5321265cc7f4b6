"""What Muon's updates cost is what PyTorch counts in them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megaponder.config.schema import ModelConfig
from megaponder.plan.extras import matrices, orthogonal
from megaponder.training import muon


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 40)])
def test_flops_of_a_matrix(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        muon.orthogonal(torch.randn(shape))
    assert counter.get_total_flops() == orthogonal(*shape)


def test_queries_keys_values_gate_and_up_count_by_themselves() -> None:
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_size": 8, "ffn_size": 48}
    found = matrices(ModelConfig(activation="swiglu", **sizes))
    assert found == [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
    assert matrices(ModelConfig(activation="gelu", **sizes))[4:] == [(48, 32), (32, 48)]
