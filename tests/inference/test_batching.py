"""Depth-wise batching gives the greedy text and the depths of one text alone, whatever shares its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaponder.decoding.steps import Stepwise
from megaponder.errors import UserError
from megaponder.export.compose import decoding_class
from megaponder.inference.batching import PAGE, DepthBatch
from tests.export import models
from tests.layouts.cases import WHOLE


def by_passes(name: str) -> bool:
    """Whether a method's tokens run one pass after the other."""
    form = decoding_class(name.removesuffix("_top"))
    return issubclass(form, Stepwise) and form.hidden is Stepwise.hidden


METHODS: dict[str, dict[str, Any]] = {
    **{name: options for name, options in models.METHODS.items() if by_passes(name)},
    "pruned_ponderlm": {"steps": 3, "depth": 2.4},
    "confident_ponderlm": {"steps": 2, "target": 0.0, "threshold": 0.06},
    "ouro": {"loops": 3, "threshold": 0.7, "skips_loops": True},
    **{name: models.METHODS[name] for name in (*models.LATENT, "nanbeige")},
}
NEW = 8
CASES = [
    (method, family)
    for i, method in enumerate(METHODS)
    for j, family in enumerate(models.FAMILIES)
    if WHOLE or (i % 2 == 0 and (i + j) % 3 == 0)
]


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(1, 60, (n,), generator=draw).tolist() for n in (1, 7, 3, 12, 5, 2, 20, 9)]


@torch.no_grad()
def alone(net: Any, prompt: list[int], **more: Any) -> tuple[list[int], list[int]]:
    """Greedy text of one prompt and the depths of its tokens, by the exported model's `generate`."""
    given = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True)
    out = net.generate(torch.tensor([prompt]), **given | more)
    depths = out.past_key_values.depths()[0].tolist()
    return out.sequences[0, len(prompt) :].tolist(), depths


@pytest.mark.parametrize(("method", "family"), CASES)
def test_text_and_depths_are_those_of_one_text_alone(method: str, family: str) -> None:
    net = models.model(family, method, method_options=METHODS[method]).double()
    want = [alone(net, prompt) for prompt in prompts()]
    if method == "adaponderlm":
        assert len({d for _, depths in want for d in depths}) == 4 or family != "llama"  # every depth occurs
    sizes = [(4, None), (16, None), (4, 14)]
    for rows, pages in [(1, None), *sizes] if WHOLE or method == "ponderlm" else sizes:
        batch = DepthBatch(net, rows=rows, tokens=40, pages=pages)
        batch.chunk = 5  # prompts in chunks
        got = batch.run(prompts(), NEW)
        assert [(x.tokens, x.depths) for x in got] == want
        rides = batch.method.halts and method not in models.LATENT  # prompts of methods with latents run apart
        assert batch.counts.beside > 0 or rows != 4 or not rides
        assert batch.slots.free and sorted(batch.slots.free) == list(range(1, len(batch.slots.free) + 1))
        # pages cost each text at most a page, less one slot, beyond the sum of depths and the steps until the next look
        assert batch.counts.most_pages * PAGE <= batch.counts.most_slots + rows * (PAGE - 1 + batch.look)
        if not batch.counts.preempted:  # each pass that a token runs is one row of one step
            assert batch.counts.rows + batch.counts.prompt_rows == sum(sum(depths) for _, depths in want)


def test_rows_give_way_and_resume_with_halting() -> None:
    net = models.model("llama", "adaponderlm").double()
    batch = DepthBatch(net, rows=4, tokens=40, pages=11)
    want = [alone(net, prompt, max_new_tokens=12) for prompt in prompts()]
    assert [(x.tokens, x.depths) for x in batch.run(prompts(), 12)] == want
    of_prompts = sum(sum(depths[: len(p) - 1]) for p, (_, depths) in zip(prompts(), want, strict=True))
    assert batch.counts.preempted > 0 and batch.counts.prompt_rows > of_prompts
    assert batch.counts.most_pages <= 11 and batch.counts.most_slots <= 11 * PAGE
    with pytest.raises(UserError, match="needs more"):
        DepthBatch(net, rows=2, tokens=40, pages=4).run(prompts(), NEW)


def test_passes_thresholds_and_ends() -> None:
    net = models.model("llama", "adaponderlm").double()
    for given in ({"passes": 2}, {"threshold": 0.9}):
        got = DepthBatch(net, rows=3, tokens=40, **given).run(prompts(), NEW)  # type: ignore[arg-type]
        assert [(x.tokens, x.depths) for x in got] == [alone(net, p, **given) for p in prompts()]
    words, _ = alone(net, prompts()[0])
    end = words[5]
    batch = DepthBatch(net, rows=3, tokens=40, eos=end)
    stream = batch.stream(prompts()[:4], NEW)
    assert next(stream).tokens == words[: words.index(end) + 1]
    before = batch.counts.steps
    assert len(list(stream)) == 3 and batch.counts.steps > before, "the first was there before the last had run"
    with pytest.raises(UserError, match="a prompt of 12 tokens and 30 new ones exceed the longest text of 40"):
        DepthBatch(net, tokens=40).run(prompts(), 30)


def test_methods_without_passes_of_their_own_are_refused() -> None:
    for method, why, options in (
        ("pause", "all rows of a token run in one pass", {}),
        ("huginn", "its first and last layers run once a token, and those between several times", {}),
        ("nanbeige", "its middle layers run more often than the others", {"loops": 2, "middle": 2}),
        ("ouro", "with threshold 0.7 a token that has exited still runs its later loops", {"threshold": 0.7}),
    ):
        given = {"method_options": options} if options else {}
        with pytest.raises(
            UserError, match=f"method {method} cannot be batched by depth: {why}.*; give its prompts as"
        ):
            DepthBatch(models.model("llama", method, **given))
    with pytest.raises(UserError, match="ponderlm3 with a sliding window cannot be batched by depth"):
        DepthBatch(models.model("llama", "ponderlm3", attention_window=4))


def test_sliding_windows() -> None:
    net = models.model("llama", "adaponderlm", attention_window=4).double()
    want = [alone(net, prompt) for prompt in prompts()]
    assert want != [alone(models.model("llama", "adaponderlm").double(), prompt) for prompt in prompts()]
    assert [(x.tokens, x.depths) for x in DepthBatch(net, rows=3, tokens=40).run(prompts(), NEW)] == want
    with pytest.raises(UserError, match="adaptive_cot with a sliding window cannot be batched by depth"):
        DepthBatch(models.model("llama", "adaptive_cot", attention_window=4))
