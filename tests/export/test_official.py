"""The modelling file against numbers of the authors' own code: logits and every gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megaponder.export.formats import FORMATS
from megaponder.export.modeling_megaponder import MegaponderConfig, MegaponderForCausalLM
from megaponder.export.native import from_native
from tests.tolerance import PARITY, difference

FOLDER = Path(__file__).parents[1] / "fixtures" / "official"
H = 32
CASES = {
    "llama_loop_R3": dict(
        family="llama", method="loop", method_options={"extra_passes": 3}, embedding_scale=(2.5 * H) ** 0.5,
        rotary_fraction=1.0, intermediate_size=48,
    ),
    "llama_pause_M2": dict(
        family="llama", method="pause", method_options={"pauses": 2, "pause_token_id": 93}, embedding_scale=H**0.5,
        rotary_fraction=1.0, intermediate_size=48,
    ),
    "neox_ponderlm1_S3": dict(
        family="pythia", method="ponderlm", method_options={"steps": 3}, embedding_scale=H**0.5,
        rotary_fraction=0.5, intermediate_size=128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients(name: str, attention: str) -> None:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as f:
        data = {k: torch.tensor(f[k]) for k in f.files}
    form = FORMATS["llama" if CASES[name]["family"] == "llama" else "gpt_neox"]
    weights, gradients = (
        from_native({k[2:]: v for k, v in data.items() if k[:2] == p and "adapter" not in k}, form, 4)
        for p in ("w/", "g/")
    )
    shape = dict(vocab_size=96, hidden_size=H, num_hidden_layers=3, num_attention_heads=4)
    net = MegaponderForCausalLM(MegaponderConfig(**shape, **CASES[name], attn_implementation=attention))
    net.load_state_dict(weights, strict=True)
    output = net(data["ids"], labels=data["ids"])
    assert difference(output.logits, data["logits"]) < PARITY
    assert difference(output.loss, data["loss"]) < PARITY
    output.loss.backward()
    got = {k: p.grad for k, p in net.named_parameters()}
    assert got.keys() == gradients.keys()
    for key, want in gradients.items():
        error = difference(got[key], want)
        assert error < PARITY, f"{key}: gradient differs by {error:.1e} of its largest value"
