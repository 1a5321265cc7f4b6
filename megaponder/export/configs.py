"""config.json of an export: every field of our configuration has a place in it, or the export stops."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megaponder.config.schema import ModelConfig, RunConfig
from megaponder.errors import UserError
from megaponder.export import compose
from megaponder.ponder.settings import embedding_scale, method_of

# our field -> the modelling code's; `embedding_scale` is written as a number
PONDER_FIELDS = {
    "family": "family",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "norm_eps",
    "rotary_fraction": "rotary_fraction",
    "rotary_base": "rotary_base",
    "parallel_residual": "parallel_residual",
    "tie_embeddings": "tie_word_embeddings",
}
NEOX_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "layer_norm_eps",
    "parallel_residual": "use_parallel_residual",
    "tie_embeddings": "tie_word_embeddings",
}
LLAMA_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
GPT2_FIELDS = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "ffn_size": "n_inner",
    "vocab_size": "vocab_size",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings",
}
NATIVE_FIELDS = {"pythia": NEOX_FIELDS, "llama": LLAMA_FIELDS, "gpt2": GPT2_FIELDS}
NATIVE_TYPES = {
    "pythia": ("gpt_neox", "GPTNeoXForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
}
# how the weights came to be, or how they lie in checkpoints: without meaning for an export
TRAINING_ONLY = {"preset", "vocab_multiple", "init", "init_std", "init_output_scale"}


def check_fields_known() -> None:
    """Refuse to export while the configuration has a model field that this module does not know."""
    unknown = {f.name for f in fields(ModelConfig)} - PONDER_FIELDS.keys() - TRAINING_ONLY - {"embedding_scale"}
    if unknown:
        raise UserError(f"model.{min(unknown)} has no place in the exported configuration (megaponder.export.configs).")


def scale_of(cfg: RunConfig) -> float:
    """The factor on token embeddings as a number."""
    return embedding_scale(cfg, method_of(cfg))


def why_not_native(cfg: RunConfig) -> str | None:
    """The reason why transformers' own classes cannot hold this model; None if they can."""
    m = cfg.model
    if cfg.ponder.method != "vanilla":
        return f"method {cfg.ponder.method}"
    if m.family != "llama" and m.num_kv_heads != m.num_heads:
        return f"grouped key/value heads in a {m.family} block"
    if m.family == "llama" and m.rotary_fraction != 1.0:
        return f"rotary fraction {m.rotary_fraction:g} in a llama block"
    if scale_of(cfg) != 1.0 and m.tie_embeddings:
        return f"embedding scale {scale_of(cfg):g} on a tied table"
    return None


def _common(cfg: RunConfig, dtype: str, eos: int | None) -> dict[str, Any]:
    # documents follow each other with one EOD in between: it is what stands before a text, so it is also the BOS
    return {
        "dtype": dtype,
        "initializer_range": cfg.model.init_std or 0.02,
        "use_cache": True,
        "bos_token_id": eos,
        "eos_token_id": eos,
        "pad_token_id": None,
    }


def _mapped(model: ModelConfig, names: dict[str, str]) -> dict[str, Any]:
    out = {}
    for ours, theirs in names.items():
        value = getattr(model, ours)
        if value is None:
            raise UserError(f"model.{ours} is not set in the checkpoint's configuration, so it cannot be exported.")
        out[theirs] = value
    return out


def ponder_config(cfg: RunConfig, dtype: str, eos: int | None) -> dict[str, Any]:
    """config.json of an export with modelling code of its own."""
    check_fields_known()
    form, options = compose.decoding_class(cfg.ponder.method), method_of(cfg).options
    return {
        "model_type": "megaponder",
        "architectures": ["MegaponderForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{compose.CONFIGURATION}.MegaponderConfig",
            "AutoModelForCausalLM": f"{compose.ENTRY}.MegaponderForCausalLM",
        },
        "method": cfg.ponder.method,
        "method_options": {f.name: getattr(options, f.name) for f in fields(options)},
        "embedding_scale": scale_of(cfg),
        **form.config_fields,
        **_mapped(cfg.model, PONDER_FIELDS),
        **_common(cfg, dtype, eos),
    }


def native_config(cfg: RunConfig, dtype: str, eos: int | None) -> dict[str, Any]:
    """config.json for transformers' own class of the family (vanilla models)."""
    check_fields_known()
    m = cfg.model
    assert m.family is not None and m.hidden_size is not None and m.num_heads is not None
    kind, architecture = NATIVE_TYPES[m.family]
    out = {"model_type": kind, "architectures": [architecture], **_mapped(m, NATIVE_FIELDS[m.family])}
    out |= _common(cfg, dtype, eos)
    if m.family == "pythia":
        # older releases of transformers read rotary_pct and rotary_emb_base, newer ones rope_parameters
        out |= {"hidden_act": "gelu", "hidden_dropout": 0.0, "attention_dropout": 0.0, "attention_bias": True}
        out |= {"rotary_pct": m.rotary_fraction, "rotary_emb_base": m.rotary_base}
        rope = {"partial_rotary_factor": m.rotary_fraction}
    elif m.family == "llama":
        out |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
        out |= {"head_dim": m.hidden_size // m.num_heads, "rope_theta": m.rotary_base}
        rope = {}
    else:
        out |= {"activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return out
    out["rope_parameters"] = {"rope_type": "default", "rope_theta": m.rotary_base, **rope}
    return out
