"""Looped models leave out loops and recurrences that a token does not need."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from megaponder.config.load import from_mapping
from megaponder.decoding.model import CACHE_FIELD
from megaponder.errors import ConfigError
from megaponder.ponder.base import Shape
from megaponder.ponder.registry import build_method
from tests.export import models
from tests.tolerance import PARITY


def _rows(net: torch.nn.Module) -> list[int]:
    """Rows that each layer call computes, noted as they run."""
    seen: list[int] = []
    for layer in net.model.layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0] * args[0].shape[1]))
    return seen


@torch.no_grad()
def test_exits_of_ouro_save_loops() -> None:
    """A token that stops leaves its later loops out, cached or not; a single token loses nothing by it."""
    options = models.METHODS["ouro"] | {"skips_loops": True}
    net, tokens = models.model("llama", "ouro", method_options=options), models.ids(2, 9)
    seen = _rows(net)
    whole = net(tokens, use_cache=False, output_depths=True)
    assert 1 <= float(whole.depths.min()) < float(whole.depths.max()) <= 3
    assert sum(seen) == 2 * int(whole.depths.sum()) < 2 * 3 * tokens.numel()
    first = net(tokens[:, :4], use_cache=True)
    rest = net(tokens[:, 4:], cache=first[CACHE_FIELD])
    got = torch.cat([first.logits, rest.logits], dim=1)
    torch.testing.assert_close(got, whole.logits, rtol=0, atol=PARITY * float(got.abs().max()))
    exact = models.model("llama", "ouro")(tokens[:, :1], use_cache=False).logits
    torch.testing.assert_close(net(tokens[:, :1]).logits, exact, rtol=0, atol=PARITY * float(exact.abs().max()))


@torch.no_grad()
def test_a_threshold_of_one_means_all_loops() -> None:
    """In BF16 the exit probabilities of a sure gate add up to 1.0 after the first loop."""
    net = models.model("llama", "ouro", method_options={"loops": 3, "threshold": 1.0, "skips_loops": True}).bfloat16()
    net.method["gate"].weight.zero_()
    net.method["gate"].bias.fill_(6.5)
    assert torch.sigmoid(net.method["gate"].bias).item() == 1.0
    assert int(net(models.ids(1, 5), output_depths=True).depths.min()) == 3
    assert int(net(models.ids(1, 5), threshold=0.99, output_depths=True).depths.max()) == 1


@torch.no_grad()
def test_exits_of_huginn_save_recurrences() -> None:
    """A core that stops after one recurrence is a model of one recurrence, and its cache is complete."""
    net, tokens = models.model("llama", "huginn"), models.ids(2, 7)
    one = net(tokens, passes=1, use_cache=False).logits
    seen = _rows(net)
    stopped = net(tokens, exit_below=1e9, use_cache=True, output_depths=True)
    assert len(seen) == 2 and int(stopped.depths.max()) == 1  # a layer of the prelude, one of the core
    torch.testing.assert_close(stopped.logits, one)
    cache = stopped[CACHE_FIELD]
    assert len(cache.layers) == 2 and cache.depths().max() == 1  # what did not run takes no memory
    going = net(tokens[:, :1], cache=cache, output_depths=True)  # runs all three, over what is there
    assert int(going.depths.max()) == 3 and going.logits.isfinite().all()
    keys = [cache.layers[index * 2 + 1].keys[:, :, :7] for index in range(3)]
    assert all(torch.equal(k, keys[0]) for k in keys[1:])
    some = net(tokens, exit_below=0.5, output_depths=True).depths
    assert 1 <= int(some.max()) <= 3
    torch.testing.assert_close(net(tokens, exit_below=1e-9).logits, net(tokens).logits)
    with pytest.raises(ValueError, match="passes = 0"):
        net(tokens, passes=0)


@torch.no_grad()
@pytest.mark.parametrize("by", ["change", "cosine", "entropy", "divergence", "min_p", "likeliest"])
def test_criteria_of_huginn(by: str) -> None:
    """Each stops where plain numbers say so, and one that never holds changes nothing, cached or not."""
    options = models.METHODS["huginn"] | {"recurrence": 6, "coda": 1, "prelude": 0}
    net, tokens = models.model("llama", "huginn", method_options=options), models.ids(1, 7)
    whole = net(tokens, use_cache=False).logits
    never = dict(exit_by=by, exit_below=9.0 if by == "likeliest" else 1e-30)
    first = net(tokens[:, :4], use_cache=True, **never)
    rest = net(tokens[:, 4:], cache=first[CACHE_FIELD], **never)
    got = torch.cat([first.logits, rest.logits], dim=1)
    torch.testing.assert_close(got, whole, rtol=0, atol=PARITY * float(whole.abs().max()))
    steps = [net(tokens, passes=r, use_cache=False).logits for r in range(1, 7)]
    p = [x.double().softmax(-1) for x in steps]
    likely = [torch.where(x < 0.1 * x.amax(-1, keepdim=True), 1 / x.shape[-1], x) for x in p]
    likely = [x / x.sum(-1, keepdim=True) for x in likely]
    entropy = [-(x * x.log()).sum(-1) for x in p]
    measured = {
        "entropy": [(b - a).abs().max() for a, b in pairwise(entropy)],
        "divergence": [(a * (a.log() - b.log())).sum(-1).max() for a, b in pairwise(p)],
        "min_p": [(a * (a.log() - b.log())).sum(-1).max() for a, b in pairwise(likely)],
        "likeliest": [-float((a.argmax(-1) == b.argmax(-1)).all()) for a, b in pairwise(p)],
    }
    if by in measured:
        below = 1.0 if by == "likeliest" else 1.0001 * float(min(measured[by][:-1]))
        limit = -0.5 if by == "likeliest" else below
        want = next((i + 2 for i, x in enumerate(measured[by][:-1]) if x < limit), 6)
    else:
        below, want = 1e9, 1
    done = net(tokens, exit_by=by, exit_below=below, use_cache=True, output_depths=True)
    assert int(done.depths.max()) == want
    torch.testing.assert_close(done.logits, steps[want - 1], rtol=0, atol=PARITY * float(whole.abs().max()))
    with pytest.raises(ValueError, match=r"exit_by = 'entrpy': it must be change, cosine, .*; use entropy"):
        net(tokens, exit_by="entrpy")


NAN = float("nan")
OUTSIDE: list[tuple[str, str, Any, str]] = [
    *(("ouro", "threshold", x, f"it must lie between 0 and 1{fix}") for x, fix in (
        (NAN, ", and a finite number; leave it out"), (1.5, "; use 1"), (-1.0, "; use 0"),
    )),
    *(("huginn", "exit_below", x, f"it must be at least 0{fix}") for x, fix in (
        (NAN, ", and a finite number; leave it out"), (float("inf"), ", and a finite number; leave it out"),
        (-1.0, "; use 0"),
    )),
    ("ouro", "kv_budget", -1, "it must be at least 0; use 0"),
    ("huginn", "kv_budget", -1, "it must be at least 0; use 0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "field", "value", "words"), OUTSIDE)
def test_numbers_have_one_range(name: str, field: str, value: Any, words: str) -> None:
    """As an argument of a call and as an option of a run."""
    with pytest.raises(ValueError, match=field) as refused:
        models.model("llama", name)(models.ids(1, 3), **{field: value})
    assert str(refused.value) == f"{field} = {value!r}: {words}"
    with pytest.raises(ConfigError) as refused_option:
        if value != value:  # no file may contain one
            from_mapping({"ponder": {"options": {field: value}}})
        build_method(name, {field: value}, Shape("llama", 8, 32))
    assert value != value or str(refused_option.value) == f"ponder.options.{field} = {value!r}: {words}."


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("huginn", {"exit_by": "entropy"}, "exit_by = 'entropy': nothing stops while exit_below is 0; give exit_below"),
        ("huginn", {"exit_by": "likeliest", "exit_below": 0.5}, "exit_below = 0.5: with exit_by = likeliest it counts"),
        ("huginn", {"kv_budget": 4}, "kv_budget = 4: a token runs 3 passes, so it would keep those of all; use 0"),
        ("huginn", {"kv_budget": 3, "passes": 2}, "kv_budget = 3: a token runs 2 passes"),
        ("huginn", {"kv_rule": "anchor"}, "kv_rule = 'anchor': all keys and values are kept while kv_budget is 0"),
        ("huginn", {"passes": 2.5}, "passes = 2.5: it must be a whole number; use 2"),
        ("ouro", {"kv_budget": 4}, "kv_budget = 4: a token runs 3 passes, so it would keep those of all; use 0"),
        ("ouro", {"passes": 4}, "passes = 4: it must be 1 to 3, the passes that the model was trained with; use 3"),
        ("nanbeige", {"passes": 3}, "passes = 3: it must be 1 to 2, the passes that the model was trained with; use 2"),
        ("ouro", {"passes": "2"}, "passes = '2': it must be at least 1, and a finite number; leave it out"),
    ],
)
def test_arguments_without_sense(name: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=" = ") as refused:
        models.model("llama", name)(models.ids(1, 3), **given)
    assert str(refused.value).startswith(words)
