"""Depth-Attention in decoding: training, whole texts, tokens with a cache, batches and exports compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaponder.decoding.model import CACHE_FIELD
from megaponder.errors import UserError
from megaponder.export.to_hf import export
from megaponder.inference.batching import DepthBatch
from megaponder.inference.speculate import speculate
from tests.export import checkpoints
from tests.export.models import HALTING, ids, model
from tests.export.test_decoding import EXACT, close, kept_and_recomputed
from tests.layouts.cases import WHOLE
from tests.tolerance import PARITY, RTOL

LAYERS = {"num_hidden_layers": 3}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "all": ("llama", "vanilla", {"sources": "all"}),
    "across": ("llama", "loop", {"sources": "last:4", "query": "mean_prob"}),
    "raw": ("pythia", "ponderlm", {"values": "raw", "own": "residual", "scale": 0.3}),
    "halting": ("llama", "adaponderlm", {"sources": "stride:2"}),
    "latents": ("llama", "ponderlm2", {"sources": [0, 1], "passes": "within"}),
}
if WHOLE:
    CASES |= {
        "blocks": ("gpt2", "nanbeige", {"blocks": 3, "passes": "within"}),
        "merged": ("pythia", "adaptive_cot", {"sources": "all"}),
        "pauses": ("pythia", "pause", {"sources": "all", "query": "mean_prob"}),
        "ouro": ("llama", "ouro", {"sources": "last:5"}),
        "routed": ("gpt2", "ponderlm3", {"sources": "last:2", "passes": "within"}),
    }


def net_of(name: str) -> Any:
    family, method, depth = CASES[name]
    return model(family, method, **LAYERS, depth_attention=depth)


@pytest.mark.parametrize("name", list(CASES))
@torch.no_grad()
def test_cached_batched_and_padded_logits_equal_whole_forwards(name: str) -> None:
    family, method, _ = CASES[name]
    net, tokens = net_of(name), ids(2, 9)
    whole = net(tokens, use_cache=False, **EXACT).logits
    plain = model(family, method, **LAYERS)
    assert (plain(tokens, use_cache=False, **EXACT).logits - whole).abs().max() > 0.01 * whole.abs().max()
    assert {k: v.shape for k, v in plain.state_dict().items()} == {k: v.shape for k, v in net.state_dict().items()}

    first, other = (x(tokens[:, :4], use_cache=True, **EXACT) for x in (net, plain))
    cache, like = first[CACHE_FIELD], other[CACHE_FIELD]
    steps = [first.logits]
    for cut in (slice(4, 5), slice(5, 8), slice(8, 9)):  # single tokens and a chunk
        steps.append(net(tokens[:, cut], cache=cache).logits)
        plain(tokens[:, cut], cache=like)
    close(torch.cat(steps, dim=1), whole)
    if method not in HALTING and method != "ponderlm3":  # a cache is as large as without
        held = [[(x.keys.shape, x.values.shape) for x in c.layers if x.keys is not None] for c in (cache, like)]
        assert held[0] == held[1] and held[0]

    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    padded = net(tokens, attention_mask=mask).logits
    close(padded[:1, 3:], net(tokens[:1, 3:]).logits)
    close(padded[1:], net(tokens[1:]).logits)


@torch.no_grad()
def test_one_pass_of_a_loop_is_the_plain_model() -> None:
    shape = {**LAYERS, "embedding_scale": 1.0, "depth_attention": {"sources": "all"}}
    loop, plain, tokens = model("llama", "loop", **shape), model("llama", "vanilla", **shape), ids(2, 7)
    assert torch.equal(loop(tokens, passes=1).logits, plain(tokens).logits)
    assert not torch.allclose(loop(tokens, passes=2).logits, plain(tokens).logits, rtol=RTOL)


@pytest.mark.parametrize("name", ["across", "halting", "latents"])
@torch.no_grad()
def test_generate_is_the_same_with_and_without_cache(name: str) -> None:
    net, tokens, mask = net_of(name), ids(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    common: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    for beams in (1, 3):
        cached = net.generate(tokens, use_cache=True, do_sample=False, num_beams=beams, **common)
        assert torch.equal(cached, net.generate(tokens, use_cache=False, do_sample=False, num_beams=beams, **common))


@pytest.mark.parametrize("name", list(CASES))
def test_an_export_computes_what_training_does(name: str, tmp_path: Path) -> None:
    family, method, depth = CASES[name]
    length = 8 if method in ("ponderlm2", "ponderlm3") else 40
    shape = {**LAYERS, "max_position_embeddings": length, "depth_attention": depth}
    checkpoints.make(family, method, tmp_path / "run", {"sequence_length": length}, **shape)
    done = export(tmp_path / "run", tmp_path / "hf")
    assert not done.native and done.max_difference < PARITY
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["depth_attention"] == depth


def test_what_knows_nothing_of_it_is_refused(tmp_path: Path) -> None:
    checkpoints.make("llama", "loop", tmp_path / "run", depth_attention={"sources": "last:2"})
    for target in ("unrolled", "nanbeige"):
        with pytest.raises(UserError, match=r"depth.attention .*'last:2'"):
            export(tmp_path / "run", tmp_path / "hf", target=target)
    with pytest.raises(UserError, match="Depth-Attention cannot be batched by depth"):
        DepthBatch(net_of("across"))
    with pytest.raises(UserError, match=r"Depth-Attention cannot draft by early passes: .* the layers of earlier ones"):
        speculate(net_of("across"), [1], 3)


def test_gradients_flow_through_recomputed_layers() -> None:
    """In an export too, where checkpointing sees only a layer's arguments."""
    found = kept_and_recomputed(lambda: net_of("across"), ids(2, 7), use_cache=False)
    for name, grad in found[0].items():
        assert float(grad.abs().max()) > 0, name
        close(found[1][name], grad)
