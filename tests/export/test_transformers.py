"""What users of transformers do with an export; `make test` runs this file with the oldest supported release as well.

Exports are loaded as everybody loads them: by AutoModelForCausalLM, with the folder's own code.
"""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.generation import GenerationMixin

from megaponder.errors import UserError
from megaponder.export.from_hf import import_hf
from megaponder.export.requirements import TESTED
from megaponder.export.to_hf import export
from megaponder.ponder import registry
from tests import forks
from tests.export import checkpoints
from tests.export.models import EVERY, LATENT, METHODS, VOCAB, ids, model
from tests.export.test_decoding import close
from tests.layouts.cases import WHOLE
from tests.tolerance import PARITY

GREEDY: dict[str, Any] = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
HAS_BATCHES = hasattr(GenerationMixin, "generate_batch")
FORMS = ("vanilla", "loop", "pause", "huginn", "ponderlm_top", "ponderlm3", "adaponderlm", "adaptive_cot")
"""Methods that decode each in its own way."""
MANY = EVERY if WHOLE else FORMS
"""One method of each way; `test_decoding` has all."""


@pytest.mark.parametrize("family,method", [("pythia", "adaponderlm"), ("gpt2", "loop")])
def test_a_folder_in_this_release(family: str, method: str, tmp_path: Path) -> None:
    """Exported, loaded from shards, decoded in a padded batch with and without cache, saved, and imported again."""
    short = {"max_position_embeddings": 24}
    net = checkpoints.make(family, method, tmp_path / "run", {"sequence_length": 24}, **short)
    folder = tmp_path / f"{method}-model"  # transformers keeps code by the folder's name
    done = export(tmp_path / "run", folder, shard_bytes=30_000)
    assert done.max_difference < PARITY and "model.safetensors.index.json" in done.files
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokens, mask = ids(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    with torch.no_grad():
        close(loaded(tokens, attention_mask=mask).logits, net(tokens, attention_mask=mask).logits)
    for beams in (1, 3):
        common = dict(attention_mask=mask, max_new_tokens=3, num_beams=beams, **GREEDY)
        text = loaded.generate(tokens, **common)
        assert torch.equal(text, loaded.generate(tokens, use_cache=False, **common))
    loaded.save_pretrained(tmp_path / f"{method}-saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / f"{method}-saved", trust_remote_code=True)
    assert torch.equal(again(tokens).logits, loaded(tokens).logits)
    assert import_hf(folder, tmp_path / "back").max_difference < PARITY


@pytest.mark.parametrize("method", MANY)
def test_speculation_changes_no_text(method: str) -> None:
    """Prompt lookup and an assistant that guesses: their cache is cropped where a guess was wrong; and a prompt that
    is read in chunks."""
    # with a coda, the last recurrence stores nothing of the last layer
    whole = {"num_hidden_layers": 3, "method_options": METHODS[method] | {"coda": 1}} if method == "huginn" else {}
    net, tokens = model("llama", method, **whole), ids(1, 6).repeat(1, 2)
    how = GREEDY | {"max_new_tokens": 4 if method in LATENT else 8, "eos_token_id": VOCAB - 1}
    text = net.generate(tokens, **how)
    assert torch.equal(net.generate(tokens, prompt_lookup_num_tokens=2, **how), text)
    if hasattr(net, "_prefill"):  # earlier releases compile the chunks' forward as one graph, which it is not
        assert torch.equal(net.generate(tokens, prefill_chunk_size=5, **how), text)
    assistant = model("llama", "loop", seed=3)
    assert torch.equal(net.generate(tokens, assistant_model=assistant, **how), text)


@pytest.mark.parametrize("method", MANY)
def test_embeddings_in_place_of_ids(method: str) -> None:
    net, tokens = model("pythia", method), ids(2, 5)
    words = net.get_input_embeddings()(tokens)
    if net.ponder.needs_ids:
        with pytest.raises(ValueError, match="reads the ids themselves; give input_ids"):
            net(inputs_embeds=words)
        return
    with torch.no_grad():
        close(net(inputs_embeds=words).logits, net(tokens).logits)
    want = net.generate(tokens, max_new_tokens=3, **GREEDY)[:, 5:]
    for cached in (True, False):
        got = net.generate(inputs_embeds=words, max_new_tokens=3, use_cache=cached, **GREEDY)
        assert torch.equal(got[:, -3:], want)


@pytest.mark.parametrize("method", MANY)
@torch.no_grad()
def test_hidden_states(method: str) -> None:
    net, tokens = model("llama", method), ids(2, 5)
    output = net(tokens, output_hidden_states=True)
    close(net.lm_head(output.hidden_states[-1]), output.logits)
    assert len(output.hidden_states) >= 3  # what enters a pass, and what its two layers give
    assert net(tokens).hidden_states is None
    steps = net.generate(
        tokens, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True, **GREEDY
    ).hidden_states
    assert len(steps) == 2 and steps[1][-1].shape == (2, 1, 32)


def test_hidden_states_of_a_plain_model_are_those_of_transformers(tmp_path: Path) -> None:
    net = checkpoints.make("llama", "vanilla", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hf")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        pairs = [x(ids(1, 5), output_hidden_states=True).hidden_states for x in (net, plain)]
    for ours, theirs in zip(*pairs, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("method", MANY)
def test_gradient_checkpointing_both_ways(method: str) -> None:
    grads = []
    for settings in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        net = model("pythia", method).train()
        if settings is not None:
            net.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        net(ids(2, 6), labels=ids(2, 6)).loss.backward()
        grads.append({k: p.grad for k, p in net.named_parameters()})
    for name, grad in grads[0].items():
        for other in grads[1:]:
            assert (other[name] is None) == (grad is None)  # a gate that only training of a later stage uses
            if grad is not None:
                close(other[name], grad)


@pytest.mark.parametrize("method", EVERY if WHOLE else ("ponderlm",))
@torch.no_grad()
def test_compiled(method: str) -> None:
    """Traced by dynamo; the code that it makes is run by PyTorch's own operations."""
    few = {} if WHOLE else {"method_options": METHODS[method] | {"steps": 1}, "num_hidden_layers": 1}
    net, tokens = model("llama", method, **few), ids(2, 6)
    want, graphs = net(tokens).logits, []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch._dynamo.config.patch(disable=False):  # as it is where megatron-core was imported last
        close(torch.compile(net, backend=backend)(tokens).logits, want)
    assert graphs


def test_refusals() -> None:
    net = model("llama", "loop")
    with pytest.raises(ValueError, match="DynamicCache has no entries for passes"):
        net(ids(1, 3), past_key_values=DynamicCache())
    for kind in ("static", "hybrid"):  # of which transformers makes a default without a word
        with pytest.raises(ValueError, match=f"cache_implementation = '{kind}': no such cache has entries for passes"):
            net.generate(ids(1, 3), max_new_tokens=2, cache_implementation=kind)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        net()
    for asked in (lambda: net(ids(1, 3), output_attentions=True), lambda: net.generate(ids(1, 3), **WEIGHTS)):
        with pytest.raises(ValueError, match="output_attentions: attention never writes its weights down"):
            asked()


WEIGHTS: dict[str, Any] = dict(max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


def test_the_methods_are_all() -> None:
    shipped = {name for name, form in registry.methods().items() if form.__module__.startswith("megaponder.")}
    assert shipped == {*EVERY} - {"ponderlm_top"}


def test_more_tokens_than_positions(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        model("llama", "loop", max_position_embeddings=8)(ids(1, 8))
        assert "max_position_embeddings" not in caplog.text
        model("llama", "loop", max_position_embeddings=8)(ids(1, 9))
    assert "9 tokens are more than max_position_embeddings = 8, to which the model was trained" in caplog.text
    with pytest.raises(ValueError, match="9 tokens are more than max_position_embeddings = 8, the learned ones"):
        model("gpt2", "loop", max_position_embeddings=8)(ids(1, 9))


IN_PAGES = [
    ("llama", "vanilla"),
    ("llama", "loop"),
    ("gpt2", "ponderlm_top"),
    ("gpt2", "nanbeige"),
    ("pythia", "ouro"),
]
WITH_BATCH = pytest.mark.skipif(not HAS_BATCHES, reason="this release has no generate_batch")


@WITH_BATCH
@pytest.mark.parametrize("method", EVERY)
def test_what_continuous_batching_takes(method: str) -> None:
    """The methods of the test below; the others are refused, and the page says which are which."""
    net = model("llama", method)
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")] for row in page.splitlines() if row.startswith("| ")]
    said = next((row[3] for row in rows if f"`{method.removesuffix('_top')}`" in row[1] and len(row) > 8), "no")
    taken = method in {"ponderlm", *(name for _, name in IN_PAGES)}
    assert said == ("native" if method == "vanilla" else "yes" if taken else "no")
    if taken:
        assert net.ponder.kv_passes()
        return
    with pytest.raises(ValueError, match=f"generate_batch: method {method} does not have exactly one row"):
        net.generate_batch([ids(1, 3)[0].tolist()], generation_config=GenerationConfig(max_new_tokens=2))


@WITH_BATCH
@pytest.mark.parametrize("method,changed", [("ouro", {"kv_budget": 2}), ("nanbeige", {"share_kv": True})])
def test_what_a_pass_leaves_to_another_does_not_go_into_pages(method: str, changed: dict[str, Any]) -> None:
    net = model("llama", method, method_options=METHODS[method] | changed)
    with pytest.raises(ValueError, match=f"generate_batch: method {method} does not have exactly one row"):
        net.generate_batch([ids(1, 3)[0].tolist()], generation_config=GenerationConfig(max_new_tokens=2))


@WITH_BATCH
@pytest.mark.parametrize("family,method", IN_PAGES)
def test_continuous_batching(family: str, method: str) -> None:
    """Prompts of different lengths in one row, with keys and values in pages: the text of each alone."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    shape: dict[str, Any] = {"head_size": 12} if family == "llama" else {}  # of 32 / 4 channels otherwise
    if method == "loop":
        shape["depth_attention"] = {"sources": "last:3"}
    net, prompts = model(family, method, **shape), [ids(1, n, seed=n) for n in (3, 19, 5)]
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(page_size=8, num_blocks=32, max_batch_tokens=16)  # the longest prompt in two parts
    done = net.generate_batch(
        [prompt[0].tolist() for prompt in prompts],
        generation_config=settings,
        continuous_batching_config=small,
        warmup=False,
    )
    want = [net.generate(prompt, max_new_tokens=6, **GREEDY)[0, prompt.shape[1] :].tolist() for prompt in prompts]
    assert [list(result.generated_tokens) for result in done.values()] == want
    assert "_kv_passes" not in net.config.to_diff_dict() and net.config.num_hidden_layers == 2


def test_the_model_card(tmp_path: Path) -> None:
    """It says what the model is; its snippet runs from beside the folder, without a question and without input."""
    checkpoints.make("llama", "loop", tmp_path / "run", {"train": ["0.5", "/data/web", "0.5", "/data/code"]})
    rows = ({"step": step, "validation_loss": loss} for step, loss in ((0, 2.5), (8, 1.5)))  # one is not the past
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    export(tmp_path / "run", tmp_path / "card-model", licence="apache-2.0")
    card = (tmp_path / "card-model" / "README.md").read_text()
    for words in (
        "license: apache-2.0",
        "| method | `loop` {",
        "'extra_passes': 2",
        "2 layers, width 32, 4 heads, vocabulary 61, 64 positions",
        "0 steps, 0 tokens",
        "data | `0.5`, `web`, `0.5`, `code` |",
        "evaluation | loss 2.5000 nats per token",
        f"transformers {TESTED[0]} to {TESTED[1]} (tested)",
    ):
        assert words in card, words
    snippet = card.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "snippet.py").write_text(snippet)
    command = [forks.python(), "snippet.py"]
    ran = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ran.returncode == 0 and "tensor([" in ran.stdout, ran.stderr


def test_chat_templates(tmp_path: Path) -> None:
    """From the tokenizer's folder, or from a file; a broken one is refused."""
    talk = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    checkpoints.make("llama", "loop", tmp_path / "run", vocab_size=257)
    export(tmp_path / "run", tmp_path / "first", tokenizer_path="bytes")
    (tmp_path / "first" / "chat_template.jinja").write_text(talk)
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match=r"broken\.jinja cannot be read as a chat template"):
        export(tmp_path / "run", tmp_path / "no", tokenizer_path="bytes", chat_template=tmp_path / "broken.jinja")
    export(tmp_path / "run", tmp_path / "second", tokenizer_path=tmp_path / "first")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "second")
    said = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert said == "user: hi\n"
    with pytest.raises(UserError, match=r"--chat-template .*: it needs a tokenizer"):
        export(tmp_path / "run", tmp_path / "no", tokenizer_path="none", chat_template=tmp_path / "x")


def test_an_end_of_document_beyond_the_vocabulary(tmp_path: Path) -> None:
    checkpoints.make("llama", "loop", tmp_path / "run", {"eod_id": 70})
    with pytest.raises(UserError, match=r"data.eod_id = 70: .* below model.vocab_size = 61"):
        export(tmp_path / "run", tmp_path / "hf")
