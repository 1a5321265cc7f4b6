"""Decoding with per-pass caches: by token, in chunks, padded, in batches and under beam search, as without cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from megaponder.decoding.model import CACHE_FIELD
from megaponder.export.modeling_megaponder import MegaponderConfig, MegaponderForCausalLM
from tests.export.models import FAMILIES, HALTING, LATENT, METHODS, PASSES, ids, model
from tests.layouts.cases import WHOLE
from tests.tolerance import PARITY, difference

ALL = [(f, m) for i, f in enumerate(FAMILIES) for j, m in enumerate(METHODS) if WHOLE or (i + j) % 2 == 0]
EXACT = {"jacobi": "converge"}
"""A forward of what decoding computes; without meaning for methods whose forward is that already."""


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape and difference(a, b) < PARITY


@pytest.mark.parametrize("family,method", ALL)
@torch.no_grad()
def test_cached_logits_equal_whole_forward(family: str, method: str) -> None:
    net, tokens = model(family, method), ids(2, 9)
    whole = net(tokens, use_cache=False, **EXACT).logits
    first = net(tokens[:, :4], use_cache=True, **EXACT)
    cache, steps = first[CACHE_FIELD], [first.logits]
    for cut in (slice(4, 5), slice(5, 8), slice(8, 9)):  # single tokens and a chunk
        steps.append(net(tokens[:, cut], cache=cache).logits)
    close(torch.cat(steps, dim=1), whole)
    assert cache.get_seq_length() == 9
    if method in HALTING:
        assert len(cache.layers) == 0 and cache.slots.used == cache.slots.depths().sum() < 2 * 9 * PASSES[method]
    else:
        assert len(cache.layers) == 2 * PASSES.get(method, 1)


@pytest.mark.parametrize("family,method", ALL)
@torch.no_grad()
def test_left_padding_changes_nothing(family: str, method: str) -> None:
    net, tokens = model(family, method), ids(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    batch = net(tokens, attention_mask=mask)
    close(batch.logits[:1, 3:], net(tokens[:1, 3:]).logits)
    close(batch.logits[1:], net(tokens[1:]).logits)
    assert batch.logits.isfinite().all()


@pytest.mark.parametrize("family,method", ALL)
@torch.no_grad()
def test_right_padding_changes_nothing(family: str, method: str) -> None:
    net, tokens = model(family, method), ids(2, 7)
    whole = net(tokens).logits
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 4:] = 0
    close(net(tokens, attention_mask=mask).logits[0, :4], whole[0, :4])


@pytest.mark.parametrize("family,method", ALL)
@torch.no_grad()
def test_generate_is_the_same_with_and_without_cache(family: str, method: str) -> None:
    net, tokens = model(family, method), ids(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    new = 3 if method in LATENT else 8  # without cache, every token refines the whole text anew
    common = dict(attention_mask=mask, max_new_tokens=new, pad_token_id=0, eos_token_id=None)
    for mode in (dict(do_sample=False), dict(do_sample=False, num_beams=3)):
        cached = net.generate(tokens, use_cache=True, **common, **mode)
        assert torch.equal(cached, net.generate(tokens, use_cache=False, **common, **mode))
        alone = net.generate(tokens[1:, 2:], max_new_tokens=new, pad_token_id=0, eos_token_id=None, **mode)
        assert torch.equal(cached[1:, 6:], alone[:, 4:])


@torch.no_grad()
def test_greedy_follows_the_logits() -> None:
    net, tokens = model("pythia", "ponderlm"), ids(1, 5)
    text = net.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    for end in range(5, 11):
        assert text[0, end] == net(text[:, :end], use_cache=False).logits[0, -1].argmax()


@torch.no_grad()
def test_generation_goes_on_from_a_cache() -> None:
    net, tokens = model("llama", "pause"), ids(1, 6)
    common = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
    whole = net.generate(tokens, max_new_tokens=6, **common)
    first = net.generate(tokens, max_new_tokens=3, return_dict_in_generate=True, **common)
    name = CACHE_FIELD
    again = net.generate(first.sequences, max_new_tokens=3, **{name: first[name]}, **common)
    assert torch.equal(again, whole)


@torch.no_grad()
def test_cropped_cache_forgets_tokens() -> None:
    net, tokens = model("llama", "pause"), ids(1, 6)
    output = net(tokens, use_cache=True)
    cache = output[CACHE_FIELD]
    cache.crop(-2)
    close(net(tokens[:, 4:], cache=cache).logits, output.logits[:, 4:])


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_eager_attention_equals_sdpa(method: str) -> None:
    net, tokens = model("llama", method), ids(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    fused = net(tokens, attention_mask=mask).logits
    net.config._attn_implementation = "eager"
    close(net(tokens, attention_mask=mask).logits, fused)
    close(net(tokens[1:]).logits, fused[1:])


def kept_and_recomputed(make: Callable[[], Any], tokens: torch.Tensor, **call: Any) -> list[dict[str, Any]]:
    """Gradients by name of a model that `make` builds anew, without and with gradient checkpointing."""
    found = []
    for checkpointed in (False, True):
        net = make().train()
        if checkpointed:
            net.gradient_checkpointing_enable()
        net(tokens, labels=tokens, **call).loss.backward()
        found.append({name: p.grad for name, p in net.named_parameters()})
    return found


@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing_changes_no_gradient(method: str) -> None:
    grads = kept_and_recomputed(lambda: model("pythia", method), ids(2, 6))
    for name, grad in grads[0].items():
        if grad is None:  # of a gate that only chooses what is read out
            assert grads[1][name] is None
        else:
            close(grads[1][name], grad)


@torch.no_grad()
def test_topk_of_the_whole_vocabulary_is_the_full_mixture() -> None:
    tokens = ids(1, 5)
    full = model("pythia", "ponderlm")(tokens).logits
    for k in (61, 1000):
        close(model("pythia", "ponderlm", method_options={"steps": 2, "topk": k})(tokens).logits, full)


@torch.no_grad()
def test_topk_takes_ties_in() -> None:
    net = model("pythia", "ponderlm", method_options={"steps": 1, "topk": 1})
    h = ids(1, 3).new_zeros(1, 3, 32).float()  # every logit is 0: all tokens tie with the first
    mean = net.model.embed_tokens.weight.mean(0) * net.config.embedding_scale
    close(net.ponder.mixture(net, h, net.ponder.options["topk"]), mean.expand(1, 3, -1))


def test_mistakes_are_named() -> None:
    net = model("llama", "loop")
    with pytest.raises(ValueError, match="DynamicCache has no entries for passes"):
        net(ids(1, 3), cache=DynamicCache())
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 2\); it must be \(1, 3\)"):
        net(ids(1, 3), attention_mask=torch.ones(1, 2))
    for wrong, words in (
        (dict(method="unknown"), "must be one of adaponderlm, "),
        (dict(family="bert"), "must be pythia, llama, gpt2, or give activation"),
        (dict(method="loop", method_options={"step": 1}), "no option"),
    ):
        with pytest.raises(ValueError, match=words):
            MegaponderForCausalLM(MegaponderConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, **wrong))
