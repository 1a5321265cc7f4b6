"""Routers that differ from pass to pass, in float64: decoding, with and without cache, takes the formula's one for each
row, also where the passes of a token are not the entries of a cache, where tokens halt, and beyond the last router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaponder.export import names
from tests.export import checkpoints, models
from tests.export.models import ids
from tests.export.test_adaptive import TIGHT, decode, error
from tests.oracles.reference import Oracle

CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "passes": ("loop", {"extra_passes": 3}, 3),
    "one entry of keys": ("ouro", {"loops": 3, "threshold": 1.0, "kv_budget": 1}, 3),
    "halting": ("adaponderlm", {"steps": 3, "target": 0.0, "threshold": 0.5}, 4),
    "merged keys": ("adaptive_cot", {"steps": 3, "target": 0.0, "threshold": 0.3}, 3),
    "latents": ("ponderlm2", {"latents": 2, "jacobi": 2}, 3),
    "latents that halt": ("ponderlm3", {"latents": 2, "jacobi": 2, "target": 0.0, "threshold": 0.3}, 2),
    "pauses": ("pause", {"pauses": 2, "pause_token_id": 60}, 3),
}


@pytest.mark.parametrize("name", list(CASES))
@torch.no_grad()
def test_every_row_has_the_router_of_its_step(name: str, tmp_path: Path) -> None:
    method, options, routers = CASES[name]
    moe = {"experts": 4, "top_k": 2, "routers": routers}
    net = models.model("llama", method, method_options=options, moe=moe, intermediate_size=12).double()
    tokens = ids(2, 1 if options.get("kv_budget") else 6)  # with one, tokens read more of those that ran beside them
    cfg = checkpoints.run_config(net, tmp_path)
    oracle = Oracle(names.to_stage(dict(net.state_dict()), cfg.model), cfg.model, net.config.embedding_scale)
    whole = net(tokens).logits
    want = torch.stack([oracle.run(row, method, options).logits for row in tokens])
    assert error(whole, want) < 1e-6  # float32 in cos and sin
    stepwise, _ = decode(net, tokens)
    latent = {"jacobi": "converge"} if method in models.LATENT else {}
    assert error(stepwise, net(tokens, use_cache=False, **latent).logits) < TIGHT
    net.model.layers[0].mlp.gate.weight.data.unflatten(0, (routers, -1))[:] = 0.3  # else the first one would do
    assert error(net(tokens).logits, whole) > 1e-3
