"""Keys and values of fewer passes than a token runs: the numbers of Huginn's public cache, and memory that follows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaponder.decoding.model import CACHE_FIELD
from megaponder.errors import UserError
from megaponder.export import looped
from megaponder.export.load import build_model
from megaponder.inference.batching import DepthBatch
from megaponder.inference.speculate import speculate
from megaponder.ponder.methods.huginn import decoding
from tests.export import models
from tests.inference.test_batching import prompts
from tests.layouts.test_public_numbers import config
from tests.tolerance import PARITY, difference

PUBLIC = np.load(Path(__file__).parents[1] / "fixtures" / "looped" / "huginn_decode.npz")
"""One text token by token.  full, ring2 (compress-s4): of the public file; the others: of a float64 program that equals
it on these two."""
META = json.loads(str(PUBLIC["meta"]))


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Any:
    cfg = config("huginn", META["config"], steps=META["n_free"], kept=1)
    tensors = {k[2:]: torch.tensor(PUBLIC[k]) for k in PUBLIC.files if k.startswith("p/")}
    made = build_model(cfg, looped.to_plain("huginn_raven", tensors, cfg)).double()
    start = torch.tensor(PUBLIC["s0"]).double() / math.sqrt(2 / 5)
    monkeypatch.setattr(decoding, "token_noise", lambda ids, positions, *_: start[:, positions[0]])
    return made


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and difference(got, want) < PARITY


def by_token(net: Any, given: list[dict[str, Any]]) -> tuple[torch.Tensor, Any]:
    """Logits of the text, a token a call, and the cache."""
    out: Any = {}
    logits = []
    for word, more in zip(torch.tensor(PUBLIC["ids"]).T[:, :, None], given, strict=True):
        out = net(word, cache=out.get(CACHE_FIELD), use_cache=True, **more)
        logits.append(out.logits)
    return torch.cat(logits, dim=1), out.get(CACHE_FIELD)


@torch.no_grad()
@pytest.mark.parametrize("name", [k[7:] for k in PUBLIC.files if k.startswith("logits/")])
def test_budgets_equal_the_public_cache(name: str, net: Any) -> None:
    """The last one: tokens of different depths, where the newest keys and values stand in for those that lack."""
    given: list[dict[str, Any]] = [{"passes": depth} for depth in META["depths"]]
    if name != "latest":
        budget = 0 if name == "full" else int(name[-1])
        given = [{"kv_budget": budget, "kv_rule": "anchor" if name.startswith("anchor") else "ring"}] * 8
    got, cache = by_token(net, given)
    close(got, torch.tensor(PUBLIC[f"logits/{name}"]).double())
    assert cache.depths().tolist() == [META["depths"] if name == "latest" else [5] * 8]
    held = sum(x.keys is not None for x in cache.layers)
    assert held == 2 + 1 + 2 * (5 if name in ("full", "latest") else budget)  # prelude, coda and a core of 2 layers


@torch.no_grad()
def test_a_prompt_at_once_is_computed_in_full(net: Any) -> None:
    """What it keeps is the budget's, so that chunks of a prompt, and what follows, see less."""
    ids = torch.tensor(PUBLIC["ids"])
    whole, given = net(ids).logits, dict(kv_budget=2, use_cache=True)
    assert torch.equal(net(ids, **given).logits, whole) and torch.equal(net(ids, kv_budget=2).logits, whole)
    first = net(ids[:, :5], **given)
    rest = net(ids[:, 5:], cache=first.get(CACHE_FIELD), **given)
    close(first.logits, whole[:, :5])
    assert 0.001 < float((rest.logits - whole[:, 5:]).abs().max() / whole.abs().max()) < 0.3
    exits = net(ids, exit_by="entropy", exit_below=1e-30, **given)  # the coda reads after every recurrence
    close(exits.logits, whole)


def greedy(net: Any, prompt: list[int], **given: Any) -> tuple[list[int], list[int]]:
    """Text and depths of one prompt whose last token runs by itself, as in depth-wise batches."""
    options: dict[str, Any] = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    ids = torch.tensor([prompt])
    if len(prompt) > 1:
        out = net(ids[:, :-1], use_cache=True, **given)
        options[CACHE_FIELD] = out[CACHE_FIELD]
    done = net.generate(ids, return_dict_in_generate=True, **options, **given)
    return done.sequences[0, len(prompt) :].tolist(), done.past_key_values.depths()[0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 2])
def test_ouro_keeps_its_newest_loops(budget: int) -> None:
    """Slots of tokens that may halt hold what entries of passes hold, and every way to decode agrees."""
    few, given = [prompt[:9] for prompt in prompts()[1:4]], {"kv_budget": budget}
    never = {"loops": 3, "threshold": 1 - 1e-7}
    entries = models.model("llama", "ouro", method_options=never | given).double()
    want = [greedy(entries, prompt) for prompt in few]
    assert want != [greedy(entries, prompt, kv_budget=0) for prompt in few]
    skips = {"loops": 3, "skips_loops": True}
    for options, same in (
        (never | skips, True),
        ({**skips, "threshold": 0.7}, False),
        ({"loops": 3, "threshold": 1.0}, True),
    ):
        net = models.model("llama", "ouro", method_options=options).double()
        found = [greedy(net, prompt, **given) for prompt in few]
        assert (found == want) == same
        batch = DepthBatch(net, rows=3, tokens=16, **given)
        assert [(x.tokens, x.depths) for x in batch.run(few, 4)] == found
        assert batch.counts.most_slots <= budget * sum(len(p) + 4 for p in few)
    with pytest.raises(UserError, match=f"kv_budget = {budget}: drafts"):
        speculate(net, [1, 2], 4, **given)


@torch.no_grad()
def test_slots_are_as_many_as_the_budget(net: Any) -> None:
    options = {"loops": 3, "threshold": 1 - 1e-7, "skips_loops": True, "kv_budget": 2}
    halting, ids = models.model("llama", "ouro", method_options=options), models.ids(2, 7)
    out = halting(ids, use_cache=True)
    cache = out.get(CACHE_FIELD)
    assert cache.slots.used == 2 * 14 and cache.depths().tolist() == [[3] * 7] * 2
    for given, words in (
        ({"kv_budget": -1}, "kv_budget = -1: it must be at least 0"),
        ({"kv_rule": "x"}, "kv_rule = 'x': it must be ring or anchor; use ring"),
    ):
        with pytest.raises(ValueError, match=words):
            net(torch.tensor(PUBLIC["ids"]), **given)
    with pytest.raises(ValueError, match="kv_budget = 1: method loop has no such option"):
        models.model("llama", "loop")(ids, kv_budget=1)
