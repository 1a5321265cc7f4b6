"""`export --target`: looped models as plain ones and as Nanbeige's, and refusals where the mathematics differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megaponder.errors import UserError
from megaponder.export.from_hf import import_hf
from megaponder.export.load import load_folder
from megaponder.export.to_hf import export
from tests.export import checkpoints
from tests.export.models import ids
from tests.tolerance import PARITY

CASES: list[tuple[str, dict[str, Any]]] = [
    ("pythia", {"parallel_residual": False}),
    ("llama", {"tie_word_embeddings": True}),
    ("gpt2", {"embedding_scale": 1.0}),
    # of three passes, each layer's copy in the last two has the second router
    ("llama", {"qk_norm": "head", "intermediate_size": 12, "moe": {"experts": 4, "top_k": 2, "routers": 2}}),
]


@pytest.mark.parametrize("family,changes", CASES)
def test_an_unrolled_model_is_plain(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Loaded by transformers without remote code: same log-probabilities, same greedy text, with and without cache."""
    net = checkpoints.make(family, "loop", tmp_path / "run", **changes)
    done = export(tmp_path / "run", tmp_path / "hf", target="unrolled", shard_bytes=30_000)
    assert done.native and done.max_difference < PARITY and not [n for n in done.files if n.endswith(".py")]
    assert "model.safetensors.index.json" in done.files  # shards of copies, too
    plain, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), ids(2, 7)
    assert plain.config.num_hidden_layers == 6
    assert plain.config.tie_word_embeddings == (family == "gpt2")  # a scaled table is not the head's any more
    with torch.no_grad():
        want, got = (model(tokens).logits.log_softmax(-1) for model in (net, plain))
    assert (got - want).abs().max() < PARITY * want.abs().max()
    greedy = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(plain.generate(tokens, **greedy), net.generate(tokens, **greedy))


def test_nanbeige(tmp_path: Path) -> None:
    """The layers once under Llama's names; it comes back as the same looped model."""
    net = checkpoints.make("llama", "loop", tmp_path / "run", tie_word_embeddings=True)
    done = export(tmp_path / "run", tmp_path / "hf", target="nanbeige")
    assert done.max_difference < PARITY and "Nanbeige's format" in str(done)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["num_loops"], config["num_hidden_layers"], config["skip_loop_final_norm"]) == (3, 2, True)
    assert (config["model_type"], config["tie_word_embeddings"], config["rope_theta"]) == ("nanbeige", False, 5e5)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], net.model.embed_tokens.weight)
    scaled = net.model.embed_tokens.weight * net.config.embedding_scale
    torch.testing.assert_close(tensors["model.embed_tokens.weight"], scaled)
    again = import_hf(tmp_path / "hf", tmp_path / "again")
    assert again.config.ponder.method == "loop" and again.max_difference < PARITY
    for name, value, words in (
        ("num_loops", 0, "num_loops = 0: it must be an integer of at least 1"),
        ("loop_loss_weights", [1], r"loss_weights = \[1.0\]: it must have one number for each of the 2 loops"),
    ):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(UserError, match=words):
            load_folder(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"skip_loop_final_norm": False}))
    normed = import_hf(tmp_path / "hf", tmp_path / "normed")  # another model
    assert (normed.config.ponder.method, normed.config.ponder.options["norm_between"]) == ("nanbeige", True)
    back = json.loads((_exported(tmp_path / "normed", tmp_path / "back") / "config.json").read_text())
    assert (back["model_type"], back["skip_loop_final_norm"]) == ("nanbeige", False)
    logits = [load_folder(tmp_path / name)(ids(1, 6)).logits for name in ("hf", "back")]
    assert torch.equal(logits[0], logits[1]) and not torch.allclose(logits[0], net(ids(1, 6)).logits, rtol=0.01)


def _exported(run: Path, out: Path) -> Path:
    return export(run, out, target="nanbeige").folder


def test_a_scaled_table_is_rounded_once(tmp_path: Path) -> None:
    net = checkpoints.make("llama", "loop", tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "hf", target="nanbeige", dtype="bfloat16")
    assert done.max_difference < PARITY
    table = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(table, (net.model.embed_tokens.weight * net.config.embedding_scale).bfloat16())


def test_a_plain_model_with_a_scaled_tied_table(tmp_path: Path) -> None:
    """No native format holds it as it is; `unrolled`, once, is exact with two tables."""
    checkpoints.make("gpt2", "vanilla", tmp_path / "run", embedding_scale=2.0)
    done = export(tmp_path / "run", tmp_path / "hf", target="unrolled")
    assert done.native and done.max_difference < PARITY


def test_a_target_that_differs_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megaponder.export import targets

    checkpoints.make("llama", "loop", tmp_path / "run")
    honest = targets.nanbeige_config
    monkeypatch.setattr(targets, "nanbeige_config", lambda *args: honest(*args) | {"num_loops": 2})
    with pytest.raises(UserError, match="logits in one forward differ"):
        export(tmp_path / "run", tmp_path / "hf", target="nanbeige")
    assert not (tmp_path / "hf").exists()


REFUSED = [
    ("llama", "ponderlm", {}, "unrolled", "method ponderlm cannot be .* a mixture of embeddings, which takes the head"),
    ("llama", "pause", {}, "nanbeige", "several rows that share its position"),
    ("llama", "ponderlm2", {}, "unrolled", "one after the other"),
    ("llama", "adaptive_cot", {}, "unrolled", "earlier steps"),
    ("llama", "adaponderlm", {}, "unrolled", "tokens stop at different passes"),
    ("pythia", "loop", {}, "nanbeige", "model.norm is layernorm, the target needs rmsnorm; .*model.qkv_bias is true"),
    ("pythia", "loop", {"rotary_pairs": "adjacent"}, "unrolled", "rotary pairs adjacent in a pythia block"),
    ("gpt2", "loop", {"activation": "swiglu"}, "unrolled", "activation swiglu in a gpt2 block"),
    ("llama", "loop", {}, "gguf", "target = 'gguf': it must be unrolled, vllm, ouro, nanbeige, huginn_raven, or"),
]


@pytest.mark.parametrize("family,method,changes,target,words", REFUSED)
def test_refusals(family: str, method: str, changes: dict[str, Any], target: str, words: str, tmp_path: Path) -> None:
    from megaponder.export import targets

    cfg = checkpoints.run_config(checkpoints.models.model(family, method, **changes), tmp_path)
    with pytest.raises(UserError, match=words):
        targets.check(cfg, target)
