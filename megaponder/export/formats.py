"""The tables for export and import: names of parameters and fields in other formats, and the backbone of each format.

A feature with parameters gets its names in `LAYER_NAMES`; one that a `model_type` of transformers supports gets an
entry in `FORMATS`, used by both import and export.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

LAYER_NAMES = {
    "input_layernorm": "input_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "post_self_attn_layernorm": "input_layernorm_2",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_attention_layernorm_2",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
}
"""A layer's parameters that are the same tensor on both sides: training stage -> modelling file."""


@dataclass(frozen=True)
class Layout:
    """Names and layouts of tensors where they differ from the modelling file's (Llama's)."""

    names: dict[str, str]
    """Parts of the modelling file's names -> theirs, in order of replacement."""
    fused: Literal["", "heads", "thirds"] = ""
    """q, k and v are one matrix, ordered by heads (q, k, v of each) or in thirds."""
    transposed: bool = False
    """Layer matrices are stored as [in, out]."""
    prefix: str = ""
    """Prefix missing in the first published files."""
    unused_positions: int = 0
    """Rows of the position table before that of position 0."""


@dataclass(frozen=True)
class Coded:
    """A field of theirs whose values have other names, or stand for several of our fields."""

    ours: tuple[str, ...]
    values: dict[Any, Any]
    """Theirs -> ours; the first is transformers' default."""

    @classmethod
    def same(cls, default: bool, *ours: str) -> Coded:
        """A switch that is one or several of ours."""
        return cls(ours, {default: default, not default: not default})


_GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_SILU = Coded(("activation",), {"silu": "swiglu", "swish": "swiglu"})


def _activation(default: str) -> Coded:
    """What a plain MLP may have inside."""
    known = _GELUS | {"relu": "relu", "relu2": "relu2"}
    return Coded(("activation",), {default: known[default]} | known)


@dataclass(frozen=True)
class Format:
    """One model_type of transformers."""

    family: str
    """The family whose features it computes; fields in `taken` may differ from it."""
    architecture: str
    taken: dict[str, str]
    """Theirs -> ours (ModelConfig)."""
    defaults: dict[str, Any]
    """Theirs -> transformers' default if the file has no value."""
    coded: dict[str, Coded] = field(default_factory=dict)
    """Theirs -> what its values mean."""
    required: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Theirs -> the values that this backbone supports; the first is transformers' default and is exported."""
    idle: tuple[str, ...] = ()
    """Theirs, without effect when the others have the values in `required`."""
    same_width: tuple[str, ...] = ()
    """Theirs, which must equal the hidden size."""
    without_dropout: tuple[str, ...] = ()
    """Theirs, exported as 0.0."""
    layout: Layout | None = None
    rotary: bool = True
    experts: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Theirs -> an option of a mixture (`model.moe`), and transformers' default."""
    window: Literal["", "plain", "switched"] = ""
    """It has a sliding window: `sliding_window`, or that with `use_sliding_window` and the layers that have it."""


_NEOX = Format(
    "pythia",
    "GPTNeoXForCausalLM",
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
    {"hidden_act": _activation("gelu"), "attention_bias": Coded.same(True, "qkv_bias", "output_bias")},
    without_dropout=("hidden_dropout", "attention_dropout"),
    layout=Layout(
        {
            "model.embed_tokens.": "gpt_neox.embed_in.",
            "model.norm.": "gpt_neox.final_layer_norm.",
            "lm_head.": "embed_out.",
            "model.layers.": "gpt_neox.layers.",
            ".self_attn.o_proj.": ".attention.dense.",
            ".self_attn.qkv.": ".attention.query_key_value.",
            ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
            ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
        },
        fused="heads",
    ),
)
_LLAMA = Format(
    "llama",
    "LlamaForCausalLM",
    {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_size",
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
        "head_dim": None,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    },
    {
        "hidden_act": _SILU,
        "attention_bias": Coded.same(False, "qkv_bias", "output_bias"),
        "mlp_bias": Coded.same(False, "mlp_bias"),
    },
    {"sliding_window": (None,), "use_sliding_window": (False,)},
    idle=("max_window_layers",),
    without_dropout=("attention_dropout",),
)
_GPT2 = Format(
    "gpt2",
    "GPT2LMHeadModel",
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
    {"activation_function": _activation("gelu_new")},
    {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    without_dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    layout=Layout(
        {
            "model.embed_tokens.": "transformer.wte.",
            "model.embed_positions.": "transformer.wpe.",
            "model.norm.": "transformer.ln_f.",
            "model.layers.": "transformer.h.",
            ".input_layernorm.": ".ln_1.",
            ".post_attention_layernorm.": ".ln_2.",
            ".self_attn.o_proj.": ".attn.c_proj.",
            ".self_attn.qkv.": ".attn.c_attn.",
            ".mlp.up_proj.": ".mlp.c_fc.",
            ".mlp.down_proj.": ".mlp.c_proj.",
        },
        fused="thirds",
        transposed=True,
        prefix="transformer.",
    ),
    rotary=False,
)
_QWEN3 = replace(
    _LLAMA,
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults=_LLAMA.defaults
    | {
        "vocab_size": 151936,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
    },
    coded={"hidden_act": _SILU, "attention_bias": Coded.same(False, "qkv_bias", "output_bias")},
    required={},
    idle=(),
    window="switched",
)
_QWEN3_MOE = replace(
    _QWEN3,
    architecture="Qwen3MoeForCausalLM",
    taken={"moe_intermediate_size" if n == "intermediate_size" else n: ours for n, ours in _QWEN3.taken.items()},
    defaults={name: default for name, default in _QWEN3.defaults.items() if name != "intermediate_size"}
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "head_dim": None,
        "moe_intermediate_size": 768,
    },
    required={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    idle=("intermediate_size", "output_router_logits"),
    experts={
        "num_experts": ("experts", 128),
        "num_experts_per_tok": ("top_k", 8),
        "norm_topk_prob": ("renormalise", False),
        "router_aux_loss_coef": ("aux_weight", 0.001),
    },
)
_QWEN2 = replace(
    _QWEN3,
    family="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=_QWEN3.defaults | {"head_dim": None},
    coded={"hidden_act": _SILU},
)
_MISTRAL = replace(
    _LLAMA,
    family="mistral",
    architecture="MistralForCausalLM",
    defaults=_LLAMA.defaults
    | {"num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072},
    coded={"hidden_act": _SILU},
    required={},
    idle=(),
    window="plain",
)
_OLMO2 = replace(
    _LLAMA,
    family="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults=_LLAMA.defaults | {"vocab_size": 50304, "rms_norm_eps": 1e-5},
    coded={"hidden_act": _SILU, "attention_bias": Coded.same(False, "qkv_bias", "output_bias")},
    required={},
    idle=(),
    layout=Layout(
        {
            ".input_layernorm_2.": ".post_attention_layernorm.",
            ".post_attention_layernorm_2.": ".post_feedforward_layernorm.",
        }
    ),
)
_OPT = Format(
    "opt",
    "OPTForCausalLM",
    {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "ffn_dim": "ffn_size",
        "max_position_embeddings": "max_positions",
        "tie_word_embeddings": "tie_embeddings",
    },
    {
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    {
        "activation_function": _activation("relu"),
        "enable_bias": Coded.same(True, "qkv_bias", "output_bias", "mlp_bias"),
        "layer_norm_elementwise_affine": Coded.same(True, "norm_affine"),
    },
    {"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,)},
    same_width=("word_embed_proj_dim",),
    without_dropout=("dropout", "attention_dropout", "layerdrop"),
    layout=Layout(
        {
            "model.embed_tokens.": "model.decoder.embed_tokens.",
            "model.embed_positions.": "model.decoder.embed_positions.",
            "model.norm.": "model.decoder.final_layer_norm.",
            "model.layers.": "model.decoder.layers.",
            ".input_layernorm.": ".self_attn_layer_norm.",
            ".post_attention_layernorm.": ".final_layer_norm.",
            ".self_attn.o_proj.": ".self_attn.out_proj.",
            ".mlp.up_proj.": ".fc1.",
            ".mlp.down_proj.": ".fc2.",
        },
        prefix="model.",
        unused_positions=2,
    ),
    rotary=False,
)
FORMATS = {
    "gpt_neox": _NEOX,
    "llama": _LLAMA,
    "gpt2": _GPT2,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "mistral": _MISTRAL,
    "olmo2": _OLMO2,
    "opt": _OPT,
}
"""By model_type."""
