"""Public folders of looped models: in, and out again as the same tensors and fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megaponder.checkpoint.weights import load_weights
from megaponder.decoding.model import CACHE_FIELD
from megaponder.errors import UserError
from megaponder.export import targets
from megaponder.export.from_hf import import_hf
from megaponder.export.load import load_folder
from megaponder.export.looped import _frequencies
from megaponder.export.to_hf import export
from tests.export import checkpoints
from tests.tolerance import PARITY, difference

FIXTURES = Path(__file__).parents[1] / "fixtures" / "looped"
OURO: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"], "model_type": "ouro", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48, "vocab_size": 60,
    "total_ut_steps": 4, "early_exit_threshold": 1.0, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu", "initializer_range": 0.02,
    "auto_map": {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"}, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_sliding_window": False, "sliding_window": None,
    "layer_types": ["full_attention", "full_attention"], "max_window_layers": 2, "use_cache": True,
    "torch_dtype": "float32", "transformers_version": "4.55.0", "rope_scaling": None,
}  # fmt: skip
HUGINN: dict[str, Any] = {
    "architectures": ["RavenForCausalLM"], "model_type": "huginn_raven", "n_embd": 32, "n_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48, "n_layers": 5, "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 1, "mean_recurrence": 4, "mean_backprop_depth": 2,
    "vocab_size": 60, "padded_vocab_size": 60, "rope_base": 50000, "norm_eps": 1e-06, "qk_bias": True, "bias": False,
    "tie_embeddings": True, "injection_type": "linear", "state_init": "like-init", "block_size": 64,
    "sampling_scheme": "poisson-lognormal-filling", "block_class_name": "SandwichBlock", "nonlin_name": "SiLU",
    "mlp_class_name": "GatedMLP", "norm_class_name": "RMSNorm_llama", "init_strategy": "takase",
    "init_values": {"std": 0.1}, "effective_expected_depth": 11, "torch_dtype": "float32",
}  # fmt: skip
NANBEIGE = {
    name: value
    for name, value in OURO.items()
    if name not in ("total_ut_steps", "early_exit_threshold", "auto_map", "layer_types", "max_window_layers")
} | {
    "architectures": ["NanbeigeForCausalLM"], "model_type": "nanbeige", "num_key_value_heads": 2, "head_dim": 12,
    "num_loops": 2, "skip_loop_final_norm": False, "rope_theta": 70000000.0, "rms_norm_eps": 1e-05,
}  # fmt: skip
CASES = {"ouro_mha": OURO, "huginn_truncated": HUGINN, "nanbeige_two": NANBEIGE}


def write(name: str, path: Path, **changes: Any) -> Path:
    """The fixture's model as a public folder."""
    path.mkdir()
    z = np.load(FIXTURES / f"{name}.npz")
    tensors = {k[2:]: torch.tensor(z[k]) for k in z.files if k.startswith("p/")}
    if name.startswith("huginn"):
        tensors["freqs_cis"] = _frequencies(8, 64, 50000.0)
    (path / "config.json").write_text(json.dumps(CASES[name] | changes))
    save_file({k: t.contiguous() for k, t in tensors.items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", CASES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    theirs = write(name, tmp_path / "hf")
    done = import_hf(theirs, tmp_path / "run")
    assert done.max_difference < PARITY
    cfg, _ = load_weights(tmp_path / "run")
    assert cfg.ponder.method == name.partition("_")[0]
    back = export(tmp_path / "run", tmp_path / "back", target=CASES[name]["model_type"])
    assert back.max_difference < PARITY and not (tmp_path / "back" / "modeling_megaponder.py").exists()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CASES[name]
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "back"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor), key
    if name != "huginn_truncated":  # numbers of the public file; Huginn's have a random start of their own
        z = np.load(FIXTURES / f"{name}.npz")
        with torch.no_grad():
            logits = load_folder(tmp_path / "back")(torch.tensor(z["ids"])).logits
        torch.testing.assert_close(logits, torch.tensor(z["logits"]), rtol=0, atol=PARITY * float(logits.abs().max()))


@pytest.mark.parametrize("share", [False, True])
def test_split_loops(share: bool, tmp_path: Path) -> None:
    """LoopSplit of Nanbeige, with and without shared keys and values: in and out again, and decoding by token."""
    folder = write("nanbeige_two", tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if ".layers." in name:
            at = int(name.split(".")[2])
            tensors[name.replace(f"layers.{at}", f"layers.{at + 2}")] = (1.1 * tensor).contiguous()
    save_file(tensors, folder / "model.safetensors")
    fields = NANBEIGE | {"num_hidden_layers": 4, "enable_double_loop_split": True, "loop_middle_layers": 2}
    (folder / "config.json").write_text(json.dumps(fields | {"loop_share_kv": share}))
    assert import_hf(folder, tmp_path / "run").max_difference < PARITY
    assert load_weights(tmp_path / "run")[0].ponder.options["share_kv"] == share
    assert export(tmp_path / "run", tmp_path / "back", target="nanbeige").max_difference < PARITY
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == fields | {"loop_share_kv": share}
    net, ids = load_folder(tmp_path / "back"), torch.arange(1, 10)[None]
    with torch.no_grad():
        whole, out, steps = net(ids, use_cache=False).logits, {}, []
        for cut in (slice(0, 4), slice(4, 5), slice(5, 9)):
            out = net(ids[:, cut], use_cache=True, cache=out.get(CACHE_FIELD))
            steps.append(out.logits)
    assert difference(torch.cat(steps, dim=1), whole) < PARITY
    held = [x for x in out.get(CACHE_FIELD).layers if x.keys is not None]
    assert len(held) == (2 * 4 if share else 2 * 8)  # loops x layers, or executions


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("ouro_mha", {"total_ut_steps": "4"}, "total_ut_steps = '4': it must be an integer"),
        ("ouro_mha", {"early_exit_step": 1}, "early_exit_step"),
        ("huginn_truncated", {"injection_type": "add"}, "injection_type = 'add'"),
        ("huginn_truncated", {"n_layers_in_coda": 2}, "n_layers = 5"),
        ("huginn_truncated", {"surprise": 7}, "surprise = 7 is unknown"),
    ],
)
def test_what_cannot_be_represented_is_refused(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json") as refused:
        import_hf(write(name, tmp_path / "hf", **changes), tmp_path / "run")
    assert words in str(refused.value)


def test_other_models_have_no_such_format(tmp_path: Path) -> None:
    checkpoints.make("llama", "ouro", tmp_path / "run")  # without sandwich norms
    needs = "model.norm_placement is pre, the target needs sandwich"
    with pytest.raises(UserError, match=needs) as refused:
        export(tmp_path / "run", tmp_path / "out", target="ouro")
    scale = "model.embedding_scale is 5.65685, the target needs none (1)"
    assert str(refused.value) == f"--target ouro: {needs}; {scale}; leave --target out."
    cfg = load_weights(tmp_path / "run")[0]
    cfg.model.embedding_scale, cfg.model.qkv_bias, cfg.model.rotary_scaling = 1.0, True, {"rope_type": "linear"}
    told = [
        "ponder.method is ouro, the target needs huginn", "model.norm_placement is pre, the target needs stream",
        "model.qkv_bias is true, the target needs qk", "model.rotary_pairs is halves, the target needs adjacent",
        "model.rotary_scaling is {'rope_type': 'linear'}, the target needs {}",
        "model.num_kv_heads is 2, the target needs 4",
        "model.embedding_scale is 1, the target needs sqrt_h (5.65685)",
    ]  # fmt: skip
    with pytest.raises(UserError) as refused:  # all at once
        targets.check(cfg, "huginn_raven")
    assert str(refused.value) == f"--target huginn_raven: {'; '.join(told)}; leave --target out."
    for part in ("norm_placement", "rotary_scaling", "qkv_bias"):
        setattr(cfg.model, part, {"norm_placement": "sandwich", "rotary_scaling": {}, "qkv_bias": False}[part])
    targets.check(cfg, "ouro")
