"""Which models this plugin computes, by the fields of their config.json; everything else is refused."""

from __future__ import annotations

from typing import Any

FEATURES = {
    "norm": ("rmsnorm", "layernorm"),
    "norm_affine": (True,),
    "norm_placement": ("pre", "sandwich"),
    "qk_norm": ("none", "head"),
    "activation": ("gelu", "gelu_tanh", "swiglu"),
    "qkv_bias": (True, False),
    "positions": ("rotary", "learned"),
    "rotary_pairs": ("halves",),
    "rotary_scaling": ({},),
    "attention_window": (0,),
    "depth_attention": ({},),
    "freqkv": ({},),
}
"""Features, and those of their values that this plugin computes."""
NUMBERS = ("norm_eps", "output_bias", "mlp_bias", "rotary_fraction", "rotary_base", "parallel_residual")
SHAPE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_size"),
    *("intermediate_size", "max_position_embeddings", "tie_word_embeddings", "embedding_scale"),
)
OTHERS = (
    *("family", "method", "method_options", "model_type", "architectures", "auto_map", "megaponder_version", "dtype"),
    *("torch_dtype", "initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "head_dim"),
    *("transformers_version", "second_head"),
)


def refuse_unknown(fields: dict[str, Any]) -> None:
    """ValueError for a field of config.json whose effect would be lost."""
    for name, value in fields.items():
        if name in FEATURES and value not in FEATURES[name]:
            raise ValueError(f"{name} = {value!r}: this plugin knows {', '.join(map(str, FEATURES[name]))}")
        if name not in (*FEATURES, *NUMBERS, *SHAPE, *OTHERS) and value not in (None, False, "none", {}, []):
            raise ValueError(f"{name} = {value!r}: this plugin does not know it, so its effect would be lost")


KNOWN: dict[str, dict[str, Any]] = {
    "loop": {"extra_passes": 3},
    "ponderlm": {"steps": 3, "topk": 0, "multiply_by_steps": False},
    "adaponderlm": {"steps": 3, "topk": 0, "threshold": 1e-4, "gate_width": 4},
}
"""Methods, and those of their options that decoding reads, with defaults."""
IDLE = (
    *("explore", "cost_weight", "bottom_share", "ramp_start", "ramp_end", "cost_on"),
    *("draw", "draw_from", "draw_to", "grow_steps", "grow"),
)
"""Options of training only."""
PLAIN = {"target": 0.0, "feedback": "mixture", "accumulate": True, "router": "mlp", "shared_gate": False}
"""Options with the one value that this plugin computes."""


def options_of(config: Any) -> dict[str, Any]:
    """The method's options; ValueError for one that this plugin does not compute."""
    if config.method not in KNOWN:
        raise ValueError(
            f"method {config.method}: this plugin has {', '.join(KNOWN)}, whose tokens have one row in every pass"
        )
    known = KNOWN[config.method]
    for name, value in config.method_options.items():
        plain = (PLAIN[name],) if name in PLAIN else (None, False)
        if name not in known and name not in IDLE and value not in plain:
            rule = f"it must be {PLAIN[name]!r}" if name in PLAIN else "this plugin does not know it"
            raise ValueError(f"method_options.{name} = {value!r}: {rule}")
    return {**known, **{k: v for k, v in config.method_options.items() if k in known}}
