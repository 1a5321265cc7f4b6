"""Initial weights: drawn side by side, they are those that one after the other gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megaponder.backbone import init


class Layer(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.layer_number = number
        self.linear_qkv, self.linear_proj = nn.Linear(64, 192), nn.Linear(64, 64)
        self.input_layernorm = nn.LayerNorm(64)


def stage(kind: str) -> dict[str, torch.Tensor]:
    whole: Any = nn.Module()
    whole.decoder = nn.Module()
    whole.decoder.layers = nn.ModuleList(Layer(i + 3) for i in range(6))
    whole.output = nn.Linear(64, 500, bias=False)
    init.initialise(whole, seed=3, kind=kind, std=0.02, output_factor=0.5, tp_rank=0, tp=1, gated=False)
    assert all(p.requires_grad and p.is_leaf for p in whole.parameters())
    return dict(whole.state_dict())


@pytest.mark.parametrize("kind", ["normal", "trunc_normal"])
def test_the_number_of_drawers_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_drawers", lambda largest: 1)
    alone = stage(kind)
    monkeypatch.setattr(init, "_drawers", lambda largest: 8)
    together = stage(kind)
    assert all(torch.equal(together[name], alone[name]) for name in alone)
    generator = init.stream(3, "decoder.layers.4.linear_proj.weight")  # of layers 2 to 7 the third
    expected = torch.empty(64, 64)
    if kind == "normal":
        expected.normal_(std=0.01, generator=generator)
    else:
        nn.init.trunc_normal_(expected, std=0.01, a=-0.03, b=0.03, generator=generator)
    assert torch.equal(alone["decoder.layers.2.linear_proj.weight"], expected)
    assert alone["decoder.layers.2.input_layernorm.weight"].eq(1).all()


def test_drawers_fit_the_node_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert init._drawers(10**6) == 4 and init._drawers(2**29) == 2 and init._drawers(2**40) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert init._drawers(10**6) == 1
