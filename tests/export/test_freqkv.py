"""FreqKV in decoding: training, whole texts, tokens with a cache, batches and exports agree; memory stays."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation import stopping_criteria as stopping

from megaponder.config.model import FAMILIES
from megaponder.decoding.model import CACHE_FIELD
from megaponder.errors import UserError
from megaponder.export.configs import what_is_lost
from megaponder.export.formats import FORMATS
from megaponder.export.to_hf import export
from megaponder.inference.batching import DepthBatch
from megaponder.inference.generate import longest_text
from megaponder.inference.speculate import speculate
from tests.export import checkpoints
from tests.export.models import ids, model
from tests.export.test_decoding import close, kept_and_recomputed
from tests.layouts.cases import WHOLE
from tests.oracles import freqkv as oracle
from tests.tolerance import PARITY, RTOL

LENGTH = 26
SMALL = {"capacity": 8, "sink": 2}  # five rows of memory, three tokens a block
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("llama", "vanilla", {"freqkv": SMALL, "num_key_value_heads": 2}),
    "mixture": ("llama", "ponderlm", {"freqkv": SMALL, "rotary_scaling": YARN, "qk_norm": "head"}),
}
if WHOLE:
    CASES |= {
        "loop": ("pythia", "loop", {"freqkv": {"capacity": 7, "sink": 0, "ratio": 0.7}, "rotary_pairs": "adjacent"}),
        "values": ("llama", "parcae", {"freqkv": {"capacity": 9, "sink": 1, "ratio": 0.3}}),
        "core": ("llama", "huginn", {"freqkv": SMALL}),
        "ouro": ("llama", "ouro", {"freqkv": SMALL, "norm_placement": "sandwich"}),
        "loops": ("llama", "nanbeige", {"freqkv": SMALL}),
    }


def net_of(name: str, **more: Any) -> Any:
    family, method, features = CASES[name]
    return model(family, method, **features, **more)


def held(cache: Any) -> int:
    """Bytes of keys and values."""
    return sum(x.numel() * x.element_size() for entry in cache.layers for x in (entry.keys, entry.values))


@pytest.mark.parametrize("name", list(CASES))
@torch.no_grad()
def test_cached_batched_and_padded_logits_equal_whole_forwards(name: str) -> None:
    """Over six compressions and more, in single tokens and in chunks that span several, after each start."""
    net, tokens = net_of(name), ids(2, LENGTH)
    whole = net(tokens, use_cache=False).logits
    plain = net_of(name)
    plain.freqkv = None
    assert (plain(tokens, use_cache=False).logits - whole).abs().max() > 0.01 * whole.abs().max()
    first = net(tokens[:, :6], use_cache=True)
    cache, steps = first[CACHE_FIELD], [first.logits]
    for begin, end in ((6, 7), (7, 8), (8, 9), (9, 19), (19, 20), (20, LENGTH)):
        steps.append(net(tokens[:, begin:end], cache=cache).logits)
    close(torch.cat(steps, dim=1), whole)

    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    alone = net(tokens[:1, 4:]).logits
    padded = net(tokens, attention_mask=mask).logits
    close(padded[:1, 4:], alone)
    close(padded[1:], whole[1:])
    first = net(tokens[:, :9], attention_mask=mask[:, :9], use_cache=True)
    cache = first[CACHE_FIELD]
    for begin, end in ((9, 10), (10, 11), (11, 12), (12, 13), (13, LENGTH)):
        step = net(tokens[:, begin:end], attention_mask=mask[:, :end], cache=cache).logits
        close(step[:1], alone[:, begin - 4 : end - 4])
        close(step[1:], whole[1:, begin:end])
    right = mask.flip(1)
    close(net(tokens, attention_mask=right).logits[0, :-4], whole[0, :-4])


@torch.no_grad()
def test_memory_stays_and_keys_are_compressed_before_they_turn() -> None:
    """Ten times the capacity; at its end each cache holds what the paper's loop makes of keys before RoPE."""
    net = net_of("plain", rotary_fraction=0.5)
    capacity, n = net.freqkv.capacity, 10 * net.freqkv.capacity + 1
    seen, cache, bytes_of, tokens = [], None, [], ids(1, n)
    hook = net.model.layers[0].self_attn.k_proj.register_forward_hook(lambda m, x, y: seen.append(y))
    for i in range(n):
        out = net(tokens[:, i : i + 1], cache=cache, use_cache=True)
        cache = out[CACHE_FIELD]
        assert all(entry.keys.shape[2] <= capacity for entry in cache.layers)
        bytes_of.append(held(cache))
    hook.remove()
    assert bytes_of[capacity - 1 :] == [bytes_of[capacity - 1]] * (n - capacity + 1)
    assert cache.get_seq_length() == n and net.freqkv.events(n) == 25
    k = torch.cat(seen, 1)[0].unflatten(-1, (2, -1)).double()  # [n, g, d]
    f, at = net.freqkv, net.freqkv.capacity
    memory = k[:at]
    while at < n:
        memory = torch.cat([memory[: f.sink], oracle.compress(memory[f.sink :], f.kept), k[at : at + f.hop]])
        at += f.hop
    turned, rotated = cache.layers[0].keys[0, :, : len(memory)].transpose(0, 1).double(), k.shape[-1] // 2
    close(turned[..., rotated:], memory[..., rotated:])
    pairs = memory[..., :rotated].unflatten(-1, (2, -1))
    place, half = torch.arange(len(memory), dtype=torch.float64)[:, None, None], torch.arange(rotated // 2)
    angles = place * net.config.rotary_base ** (-2.0 * half / rotated)
    (a, b), cos, sin = pairs.unbind(-2), angles.cos(), angles.sin()
    close(turned[..., :rotated], torch.cat([a * cos - b * sin, b * cos + a * sin], -1))


@torch.no_grad()
def test_up_to_its_capacity_it_is_the_plain_model_and_never_has_more_parameters() -> None:
    net, plain, tokens = net_of("plain"), model("llama", "vanilla", num_key_value_heads=2), ids(2, 8)
    assert {k: v.shape for k, v in plain.state_dict().items()} == {k: v.shape for k, v in net.state_dict().items()}
    assert torch.equal(net(tokens).logits, plain(tokens).logits)
    caches: list[Any] = [None, None]
    for i in range(8):
        both = [m(tokens[:, i : i + 1], cache=c, use_cache=True) for m, c in zip((net, plain), caches, strict=True)]
        caches = [out[CACHE_FIELD] for out in both]
        assert torch.equal(both[0].logits, both[1].logits)
    assert not torch.allclose(net(ids(2, 12)).logits[:, 8:], plain(ids(2, 12)).logits[:, 8:], rtol=RTOL)


@pytest.mark.parametrize("name", ["mixture", "plain"] if WHOLE else ["plain"])
@torch.no_grad()
def test_generate_is_the_same_with_and_without_cache(name: str) -> None:
    net, tokens, mask = net_of(name), ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    common: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=6, pad_token_id=0, eos_token_id=None)
    for beams in (1, 3):
        cached = net.generate(tokens, use_cache=True, do_sample=False, num_beams=beams, **common)
        assert torch.equal(cached, net.generate(tokens, use_cache=False, do_sample=False, num_beams=beams, **common))
    chunked = net.generate(tokens, use_cache=True, do_sample=False, prefill_chunk_size=3, **common)
    assert torch.equal(chunked, net.generate(tokens, use_cache=True, do_sample=False, **common))


@torch.no_grad()
def test_texts_may_be_longer_than_the_positions() -> None:
    """Without transformers' warning of the model's length, which it gives once a process unless it has forgotten."""
    told: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    stopping.logger.addHandler(watch)
    try:
        for net in (net_of("plain", max_position_embeddings=8), model("llama", "vanilla", max_position_embeddings=8)):
            stopping.logger.warning_once.cache_clear()
            net.generate(ids(1, 7), max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
            assert len(told) == (net.freqkv is None), told
    finally:
        stopping.logger.removeHandler(watch)
    assert longest_text(net_of("plain").config) > 10**9
    assert longest_text(model("llama", "vanilla").config) == model("llama", "vanilla").config.max_position_embeddings


@torch.no_grad()
def test_a_cache_goes_back_as_far_as_nothing_was_compressed() -> None:
    net, tokens = net_of("plain"), ids(1, 11)
    out = net(tokens, use_cache=True)  # the memory was made before token 8
    cache = out[CACHE_FIELD]
    cache.crop(9)
    close(net(tokens[:, 9:], cache=cache).logits, out.logits[:, 9:])
    with pytest.raises(ValueError, match=r"compressed these tokens .* go back to 9 tokens"):
        cache.crop(8)


def test_what_would_compute_something_else_is_refused() -> None:
    net, tokens = net_of("mixture"), ids(1, 6)
    cache = net(tokens, use_cache=True, passes=1)
    with pytest.raises(ValueError, match="as many passes in every call"):
        net(tokens[:, :1], cache=cache[CACHE_FIELD])
    with pytest.raises(ValueError, match="generate_batch: pages keep keys as they are"):
        net.init_continuous_batching()
    with pytest.raises(UserError, match="FreqKV cannot be batched by depth"):
        DepthBatch(net)
    with pytest.raises(UserError, match="FreqKV cannot draft by early passes: pages keep keys as they are; leave spec"):
        speculate(net, [1], 3)
    with pytest.raises(ValueError, match="halted tokens would leave a pass without keys"):
        model("llama", "adaponderlm", freqkv=SMALL)(tokens)
    with pytest.raises(ValueError, match="no memory for rows that stand beside"):
        model("llama", "pause", freqkv=SMALL)(tokens)
    with pytest.raises(ValueError, match="leave out kv_budget"):
        model("llama", "ouro", freqkv=SMALL)(tokens, kv_budget=1, use_cache=True)
    section = replace(FAMILIES["llama"], num_heads=4, num_kv_heads=4, hidden_size=32, head_size=8, freqkv=SMALL)
    assert what_is_lost(section, FORMATS["llama"]) == f"freqkv {SMALL} in a llama block", "plain formats do not have it"


@pytest.mark.parametrize("name", list(CASES) if WHOLE else ["mixture"])
def test_an_export_computes_what_training_does(name: str, tmp_path: Path) -> None:
    family, method, features = CASES[name]
    shape = {**features, "max_position_embeddings": 40}
    checkpoints.make(family, method, tmp_path / "run", {"sequence_length": 40}, **shape)
    done = export(tmp_path / "run", tmp_path / "hf")
    assert not done.native and done.max_difference < PARITY
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["freqkv"] == features["freqkv"]


def test_gradients_flow_through_recomputed_layers() -> None:
    found = kept_and_recomputed(lambda: net_of("mixture"), ids(2, 15), use_cache=False)
    for name, grad in found[0].items():
        assert float(grad.abs().max()) > 0, name
        close(found[1][name], grad)
