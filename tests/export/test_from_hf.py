"""Imports: what is refused, and that the checkpoint loads at any layout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaponder.config.load import load_config
from megaponder.errors import UserError
from megaponder.export.folder import read_weights
from megaponder.export.from_hf import import_hf
from megaponder.export.hf_fields import model_config, refuse_ignored
from tests.distributed import run_workers
from tests.export import hf_models
from tests.tolerance import RTOL

BASE: dict[str, dict[str, Any]] = {
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 32, "num_attention_heads": 4},
    "llama": {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4},
    **{kind: {"model_type": kind} for kind in ("gpt2", "qwen2", "qwen3", "qwen3_moe", "mistral", "olmo2", "opt")},
}


@pytest.mark.parametrize(
    "kind,change,words",
    [
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "'longrope' is not supported"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}},
            "finetuned, which is unknown",
        ),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factr": 2.0}}, "has factr, .*; did you mean factor"),
        ("llama", {"rope_parameters": {"rope_typ": "linear"}}, "has rope_typ, .*; did you mean rope_type"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rotates full heads"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "attention_factor": 2.0}},
            "attention_factor, which is unknown",
        ),
        ("llama", {"attention_bias": "yes"}, "attention_bias = 'yes': it must be False or True for family llama"),
        ("llama", {"mlp_bias": 1}, "mlp_bias = 1"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False: it must be True for model_type opt"),
        ("opt", {"word_embed_proj_dim": 512}, "word_embed_proj_dim = 512: it must equal hidden_size = 768"),
        ("qwen2", {"use_sliding_window": True}, "layer_types: either all layers must have the sliding window, or none"),
        ("mistral", {"sliding_window": "all"}, "sliding_window = 'all': it must be a positive integer or null"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu': it must be 'silu' or 'swish' for family llama"),
        ("llama", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("gpt_neox", {"head_dim": 16}, "head_dim: heads must be hidden_size / num_attention_heads = 8 wide"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "every layer must be full_attention"),
        ("gpt_neox", {"hidden_act": "tanh"}, "hidden_act = 'tanh': it must be 'gelu' or .* for family pythia"),
        ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.25}, "rotary_pct = 0.5, but .* must be equal"),
        ("gpt_neox", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rotary_emb_base = .* must be equal"),
        ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "but rope_parameters.rope_theta = 5"),
        ("qwen3", {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2}, "has 2 entries for 3 layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: it must be 1"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = .0.: it must be "),
        ("qwen3_moe", {"num_experts": "many"}, "num_experts = 'many': it must be a positive integer"),
        ("gpt2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ("gpt2", {"activation_function": "silu"}, "activation_function = 'silu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False"),
        ("llama", {"logit_scale": 0.5}, "logit_scale = 0.5 is unknown .* delete it in a copy"),
        (
            "llama",
            {"model_type": "mamba"},
            "model_type = 'mamba' .* must be one of gpt_neox, llama, gpt2, qwen2, qwen3",
        ),
    ],
)
def test_fields_that_cannot_be_represented(kind: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"config.json: .*{words}"):
        model_config({**BASE[kind], **change}, "config.json")


def test_only_what_is_known_to_be_harmless_may_be_ignored() -> None:
    refuse_ignored(BASE["llama"], frozenset({"torch_dtype", "max_sequence_length"}), "config.json")
    with pytest.raises(UserError, match="--ignore logit_scale: only fields that are known to be without effect"):
        refuse_ignored({**BASE["llama"], "logit_scale": 0.5}, frozenset({"logit_scale"}), "config.json")


def test_fields_are_taken_over() -> None:
    neox = {
        **BASE["gpt_neox"],
        "rotary_pct": 0.5,
        "rotary_emb_base": 5e5,
        "partial_rotary_factor": 0.5,  # as transformers 4.57 saves them, too
        "rope_theta": 500000,
        "torch_dtype": "float16",
        "hidden_dropout": 0.1,
    }
    section = model_config(neox, "config.json")
    assert (section.rotary_fraction, section.rotary_base, section.embedding_scale) == (0.5, 5e5, "none")
    assert section.num_kv_heads == 4 and section.parallel_residual and section.norm_eps == 1e-5
    section = model_config(
        {**BASE["llama"], "rope_theta": 5e5, "num_key_value_heads": 2, "tie_word_embeddings": True}, ""
    )
    assert (section.rotary_base, section.num_kv_heads, section.norm_eps, section.tie_embeddings) == (5e5, 2, 1e-6, True)
    section = model_config(BASE["gpt2"], "config.json")
    assert (section.ffn_size, section.max_positions, section.tie_embeddings) == (3072, 1024, True)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    hf_models.write("llama_gqa", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    good = load_file(file)
    down, up = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"
    head = "lm_head.weight"
    changes: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({down: None}, "down_proj.weight is missing"),
        ({up: None}, "up_proj.weight is missing"),
        ({up.replace("up", "gate"): None}, "gate_proj.weight is missing"),
        ({"model.norm.weight": torch.ones(16)}, r"model.norm.weight has another shape \(\[16\] instead of \[\d+\]\)"),
        ({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight is not a parameter of this model"),
        ({up.replace("1", "9"): good[up]}, "layers.9.mlp.up_proj.weight is not a parameter of this model"),
        ({down: good[down].to(torch.float8_e4m3fn)}, f"{down} is float8_e4m3fn: quantised weights are not supported"),
        ({down: good[down].to(torch.int8)}, f"{down} is int8: quantised weights are not supported"),
    ]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for change, words in changes:
        tensors = {k: v.clone() for k, v in {**good, **change}.items() if v is not None}
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=words):
            import_hf(tmp_path / "hf", tmp_path / "run")
        assert not (tmp_path / "run" / "checkpoints").exists()
    save_file(good, file, metadata={"format": "pt"})
    for change, words in (
        ({"tie_word_embeddings": True}, "hf: tie_word_embeddings is true, but the weights of the head differ"),
        ({"rms_norm_eps": 1e300}, r"config.json: rms_norm_eps = 1e\+300: it must be .*at most 1"),
        ({"num_attention_heads": 3}, "config.json: num_key_value_heads = 2: it must divide num_attention_heads = 3"),
        ({"bos_token_id": [1]}, r"config.json: bos_token_id = \[1\]: it must be the id of a token, or null"),
        ({"model_type": ["llama"]}, "string"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
    ):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=words):
            import_hf(tmp_path / "hf", tmp_path / "run")
    base = {name.removeprefix("model."): tensor for name, tensor in good.items() if name != head}
    save_file(base, file, metadata={"format": "pt"})  # as AutoModel saves it
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    import_hf(tmp_path / "hf", tmp_path / "run")


def test_damaged_and_pickled_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json is missing"):
        import_hf(tmp_path, tmp_path / "run")
    with pytest.raises(UserError, match=r"nowhere: there is no such folder; a model of the Hugging Face hub must be"):
        import_hf(tmp_path / "nowhere", tmp_path / "run")
    (tmp_path / "own" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=r"own is a run or a checkpoint of megaponder, not a Hugging Face folder:"):
        import_hf(tmp_path / "own", tmp_path / "run")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        import_hf(tmp_path, tmp_path / "run")
    with pytest.raises(UserError, match=r"has no model\.safetensors: there are no weights"):
        read_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is pickled, and unpickling runs code"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        read_weights(tmp_path)
    index = {"weight_map": {"x": "../../etc/passwd"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"'\.\./\.\./etc/passwd' is not a file of this folder"):
        read_weights(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="is a pipe or a device"):
        import_hf(tmp_path, tmp_path / "run")


def test_more_layers_than_weights(tmp_path: Path) -> None:
    hf_models.write("llama_gqa", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has 1,000,000,000 layers, but the weights have"):
        import_hf(tmp_path / "hf", tmp_path / "run")


def loss_at_layout(checkpoint: Path, tensor: int, pipeline: int) -> float:
    """In a worker: the loss of fixed tokens with the checkpoint's weights at a layout."""
    from megaponder.checkpoint.restore import load
    from megaponder.checkpoint.state import CONFIG
    from megaponder.config.load import load_config
    from megaponder.data.batch import make_micro_batch
    from megaponder.engine import groups
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    cfg = load_config(checkpoint / CONFIG, ["--parallel.tensor", str(tensor), "--parallel.pipeline", str(pipeline)])
    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    assert load(checkpoint, engine.stage) == ([], [])
    text = torch.randint(77, (2, 18), generator=torch.Generator().manual_seed(3)).numpy()
    return engine.forward_backward([make_micro_batch(text, "plain", None)] * 2, 0, train=False).loss


def test_checkpoint_loads_at_any_layout(tmp_path: Path) -> None:
    theirs = hf_models.write("llama_gqa", tmp_path / "hf")
    done = import_hf(tmp_path / "hf", tmp_path / "run")
    text = torch.randint(77, (2, 18), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = theirs(text, labels=text).loss.item()
    for tensor, pipeline in ((2, 1), (1, 2)):
        args = {"checkpoint": done.checkpoint, "tensor": tensor, "pipeline": pipeline}
        for loss in run_workers("tests.export.test_from_hf:loss_at_layout", 2, args=args):
            assert loss == pytest.approx(want, rel=RTOL)
    start = load_config(tmp_path / "run" / "config.yaml")
    assert (start.checkpoint.load, start.run) == (str(tmp_path / "run"), f"{tmp_path / 'run'}-trained")
    assert (start.data.loss_mask, start.data.eod_id, done.config.data.eod_id) == ("plain", None, 2)
    with pytest.raises(UserError, match="step_00000000 already exists"):
        import_hf(tmp_path / "hf", tmp_path / "run")
    import_hf(tmp_path / "hf", tmp_path / "run", force=True)
