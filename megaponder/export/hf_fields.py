"""What the fields of a Hugging Face config.json mean to us: taken over, required to have a value, or without effect."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from megaponder.config.schema import ModelConfig
from megaponder.errors import UserError

# without effect on the forward pass of a causal language model, whatever their value
IGNORED = {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "add_bos_token",
    "architectures", "bos_token_id", "classifier_dropout", "dtype", "eos_token_id", "finetuning_task", "id2label",
    "initializer_range", "is_decoder", "label2id", "megaponder_version", "model_type", "n_ctx", "name_or_path",
    "num_labels", "output_attentions", "output_hidden_states", "pad_token_id", "predict_special_tokens",
    "pretraining_tp", "problem_type", "reorder_and_upcast_attn", "return_dict", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "unk_index", "use_cache", "vocab_pad_to",
    # regularisation of training; our backbones train without dropout
    "attention_dropout", "attn_pdrop", "embd_pdrop", "hidden_dropout", "resid_pdrop",
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """One model_type: names of the fields we take, their defaults where absent, and the values others must have."""

    family: str
    taken: dict[str, str]
    """Theirs -> ours (ModelConfig)."""
    defaults: dict[str, Any]
    """Theirs -> the value that transformers takes where the file has none."""
    required: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Theirs -> the values that our backbone computes; the first is transformers' default."""
    rotary: bool = True


_ROPE_NONE: tuple[Any, ...] = (None,)
FORMATS = {
    "gpt_neox": Format(
        "pythia",
        {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "intermediate_size": "ffn_size",
            "max_position_embeddings": "max_positions",
            "layer_norm_eps": "norm_eps",
            "use_parallel_residual": "parallel_residual",
            "tie_word_embeddings": "tie_embeddings",
            "rotary_pct": "rotary_fraction",
            "rotary_emb_base": "rotary_base",
        },
        {
            "vocab_size": 50432,
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000.0,
        },
        {"hidden_act": ("gelu",), "attention_bias": (True,)},
    ),
    "llama": Format(
        "llama",
        {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "num_key_value_heads": "num_kv_heads",
            "intermediate_size": "ffn_size",
            "max_position_embeddings": "max_positions",
            "rms_norm_eps": "norm_eps",
            "tie_word_embeddings": "tie_embeddings",
            "rope_theta": "rotary_base",
        },
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": None,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
        },
        {
            "hidden_act": ("silu", "swish"),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "sliding_window": (None,),
            "use_sliding_window": (False,),
        },
    ),
    "gpt2": Format(
        "gpt2",
        {
            "vocab_size": "vocab_size",
            "n_embd": "hidden_size",
            "n_layer": "num_layers",
            "n_head": "num_heads",
            "n_inner": "ffn_size",
            "n_positions": "max_positions",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tie_embeddings",
        },
        {
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        rotary=False,
    ),
}


def model_config(hf: dict[str, Any], where: str, ignore: frozenset[str] = frozenset()) -> ModelConfig:
    """Our model section of a config.json; UserError for the first field that our backbones cannot represent."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FORMATS:
        known = ", ".join([*FORMATS, "megaponder"])
        raise UserError(f"{where}: model_type = {kind!r} cannot be imported; it must be one of {known}.")
    form = FORMATS[kind]
    hf = {name: value for name, value in hf.items() if name not in ignore and name not in IGNORED}
    rope = _rope(hf, form, where)
    for name, legal in form.required.items():
        value = hf.pop(name, legal[0])
        if value not in legal:
            raise UserError(f"{where}: {name} = {value!r}: a {form.family} block computes {legal[0]!r} only.")
    values = {name: hf.pop(name, default) for name, default in form.defaults.items()} | rope
    for name, value in values.items():
        _refuse_other_type(name, value, form.defaults[name], where)
    heads, hidden = values[_theirs(form, "num_heads")], values[_theirs(form, "hidden_size")]
    if hf.pop("head_dim", None) not in (None, hidden // heads):
        raise UserError(f"{where}: head_dim: heads must be hidden_size / num_attention_heads = {hidden // heads} wide.")
    layers = hf.pop("layer_types", None) or []
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        raise UserError(f"{where}: layer_types: every layer must be full_attention.")
    if left := sorted(name for name, value in hf.items() if value not in (None, False, {}, [])):
        raise UserError(
            f"{where}: {left[0]} = {hf[left[0]]!r} is not known for model_type {kind}, so its effect would be lost; if "
            f"it has none, say --ignore {left[0]}."
        )
    ours = {form.taken[name]: value for name, value in values.items()}
    ours["num_kv_heads"] = ours.get("num_kv_heads") or ours["num_heads"]
    ours["ffn_size"] = ours["ffn_size"] or 4 * hidden
    ours = {"rotary_fraction": 1.0, "rotary_base": 10000.0, "parallel_residual": False} | ours
    return ModelConfig(family=form.family, embedding_scale="none", **ours)  # type: ignore[arg-type]


def _refuse_other_type(name: str, value: Any, default: Any, where: str) -> None:
    """UserError for a value whose type is not that of the default; sizes are positive, and None is one of them."""
    if isinstance(default, bool):
        ok, want = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        ok, want = type(value) in (int, float) and 0 < value < math.inf, "a positive number"
    else:
        ok, want = (type(value) is int and value > 0) or (value is default is None), "a positive integer"
    if not ok:
        raise UserError(f"{where}: {name} = {value!r}: it must be {want}.")


def _theirs(form: Format, ours: str) -> str:
    return next(theirs for theirs, name in form.taken.items() if name == ours)


def _rope(hf: dict[str, Any], form: Format, where: str) -> dict[str, Any]:
    """Rotary settings from `rope_parameters` (current releases), taken out of `hf`; scaling is refused."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = hf.pop(name, None) or {}
        if not isinstance(rope, dict):
            raise UserError(f"{where}: {name} = {rope!r}: it must be an object.")
        rope = dict(rope)
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        if kind != "default":
            raise UserError(f"{where}: {name} of type {kind!r}: rotary scaling is not supported; it must be default.")
        for theirs, ours in (("rope_theta", "rotary_base"), ("partial_rotary_factor", "rotary_fraction")):
            if theirs in rope and form.rotary:
                value = rope.pop(theirs)
                if ours in form.taken.values():
                    found[_theirs(form, ours)] = value
                elif value != 1.0:
                    raise UserError(f"{where}: {theirs} = {value!r}: a {form.family} block rotates whole heads.")
        if rope:
            raise UserError(f"{where}: {name} has {min(rope)}, which is not known, so its effect would be lost.")
    return found
