"""Random Hugging Face folders of all families, with odd settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

NEOX = dict(
    vocab_size=83,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=44,
    max_position_embeddings=40,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
LLAMA = dict(
    vocab_size=77,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=52,
    max_position_embeddings=40,
    bos_token_id=1,
    eos_token_id=2,
)
OPT = dict(
    vocab_size=73,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=44,
    max_position_embeddings=40,
    word_embed_proj_dim=32,
    dropout=0.0,
    bos_token_id=2,
    eos_token_id=2,
)
ODD_LLAMA = LLAMA | dict(hidden_size=36, num_attention_heads=6, num_key_value_heads=3)
"""Heads of 6 channels, an odd number of key/value heads."""
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=10, beta_fast=4.0, beta_slow=0.5)
GPT2 = dict(vocab_size=71, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=3, eos_token_id=3)


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """Rotary settings under the names of the installed transformers."""
    if hasattr(LlamaConfig(), "rope_parameters"):
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}
    fraction = more.pop("partial_rotary_factor", None)
    named = {"rope_theta": theta} if fraction is None else {"rotary_emb_base": theta, "rotary_pct": fraction}
    return named | ({"rope_scaling": more} if more else {})


CASES: dict[str, tuple[Any, Any]] = {
    "neox": (GPTNeoXForCausalLM, lambda: GPTNeoXConfig(**NEOX, **rope(1e4, partial_rotary_factor=0.25))),
    "neox_full_rotary_serial": (
        GPTNeoXForCausalLM,
        lambda: GPTNeoXConfig(
            **NEOX, **rope(5e5, partial_rotary_factor=1.0), use_parallel_residual=False, layer_norm_eps=0.1
        ),
    ),
    "neox_tied": (GPTNeoXForCausalLM, lambda: GPTNeoXConfig(**NEOX, tie_word_embeddings=True)),
    "llama_gqa": (LlamaForCausalLM, lambda: LlamaConfig(**LLAMA, **rope(5e5), num_key_value_heads=2, rms_norm_eps=0.1)),
    "llama_tied": (LlamaForCausalLM, lambda: LlamaConfig(**LLAMA, rms_norm_eps=1e-5, tie_word_embeddings=True)),
    "llama_wide_heads": (LlamaForCausalLM, lambda: LlamaConfig(**LLAMA, head_dim=12, num_key_value_heads=1)),
    "qwen3_gqa": (
        Qwen3ForCausalLM,
        lambda: Qwen3Config(**LLAMA, **rope(1e6), num_key_value_heads=2, head_dim=12, rms_norm_eps=0.1),
    ),
    "qwen3_tied": (
        Qwen3ForCausalLM,
        lambda: Qwen3Config(**LLAMA, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True),
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        lambda: Qwen3MoeConfig(
            **{k: v for k, v in ODD_LLAMA.items() if k != "intermediate_size"},
            **rope(1e6),
            **dict(head_dim=12, rms_norm_eps=0.1, moe_intermediate_size=20, num_experts=6, num_experts_per_tok=3),
            norm_topk_prob=True,
            router_aux_loss_coef=0.02,
        ),
    ),
    "gpt2": (GPT2LMHeadModel, lambda: GPT2Config(**GPT2)),
    "gpt2_untied": (
        GPT2LMHeadModel,
        lambda: GPT2Config(**GPT2, n_inner=60, layer_norm_epsilon=0.1, tie_word_embeddings=False),
    ),
    "llama3_biases": (
        LlamaForCausalLM,
        lambda: LlamaConfig(
            **ODD_LLAMA,
            **rope(5e5, **LLAMA3, original_max_position_embeddings=16),
            attention_bias=True,
            mlp_bias=True,
            rms_norm_eps=1e-5,
        ),
    ),
    "qwen2_yarn": (Qwen2ForCausalLM, lambda: Qwen2Config(**ODD_LLAMA, **rope(1e6, **YARN))),
    "mistral_window": (
        MistralForCausalLM,
        lambda: MistralConfig(**ODD_LLAMA, **rope(1e4), sliding_window=7, tie_word_embeddings=True),
    ),
    "olmo2": (Olmo2ForCausalLM, lambda: Olmo2Config(**ODD_LLAMA, **rope(5e5), rms_norm_eps=0.1, attention_bias=True)),
    "opt_gelu": (OPTForCausalLM, lambda: OPTConfig(**OPT, activation_function="gelu")),
}
MORE: dict[str, tuple[Any, Any]] = {
    "neox_scaled_without_biases": (
        GPTNeoXForCausalLM,
        lambda: GPTNeoXConfig(
            **NEOX,
            **rope(1e4, partial_rotary_factor=0.5, **YARN, attention_factor=1.3),
            attention_bias=False,
            hidden_act="gelu_new",
        ),
    ),
    "llama_linear": (LlamaForCausalLM, lambda: LlamaConfig(**LLAMA, **rope(1e4, rope_type="linear", factor=3.0))),
    "llama_dynamic": (LlamaForCausalLM, lambda: LlamaConfig(**LLAMA, **rope(1e4, rope_type="dynamic", factor=3.0))),
    "llama_yarn_mscale": (
        LlamaForCausalLM,
        lambda: LlamaConfig(**LLAMA, **rope(1e4, **YARN, mscale=1.2, mscale_all_dim=0.7, truncate=False)),
    ),
    "qwen2_window": (
        Qwen2ForCausalLM,
        lambda: Qwen2Config(**ODD_LLAMA, use_sliding_window=True, sliding_window=5, max_window_layers=0),
    ),
    "qwen2_tied": (
        Qwen2ForCausalLM,
        lambda: Qwen2Config(**LLAMA, num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-5),
    ),
    "qwen3_biases_window": (
        Qwen3ForCausalLM,
        lambda: Qwen3Config(
            **ODD_LLAMA,
            head_dim=12,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=0,
        ),
    ),
    "mistral_full": (MistralForCausalLM, lambda: MistralConfig(**ODD_LLAMA, head_dim=12, sliding_window=None)),
    "olmo2_tied_mha": (Olmo2ForCausalLM, lambda: Olmo2Config(**LLAMA, tie_word_embeddings=True)),
    "opt_relu_untied": (OPTForCausalLM, lambda: OPTConfig(**OPT, tie_word_embeddings=False)),
    "opt_without_biases": (OPTForCausalLM, lambda: OPTConfig(**OPT, enable_bias=False, activation_function="gelu")),
    "opt_without_biases_and_affine": (
        OPTForCausalLM,
        lambda: OPTConfig(**OPT, enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu"),
    ),
    "opt_without_affine": (OPTForCausalLM, lambda: OPTConfig(**OPT, layer_norm_elementwise_affine=False)),
}
"""Tested with MEGAPONDER_WHOLE_MATRIX=1."""
for moved in ("neox", "neox_tied", "llama_tied", "llama_wide_heads", "qwen3_tied", "gpt2"):
    MORE[moved] = CASES.pop(moved)


def as_stored(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors under the names of files: late releases hold all experts of a layer in one tensor, and store each."""
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(".mlp.experts.")
        if not found or after[0].isdigit():
            out[name] = tensor
            continue
        for e in range(len(tensor)):
            parts = tensor[e].chunk(2) if after == "gate_up_proj" else (tensor[e],)
            for part, matrix in zip(parts, after.removesuffix("_proj").split("_"), strict=True):
                out[f"{before}.mlp.experts.{e}.{matrix}_proj.weight"] = part
    return out


def write(name: str, out: Path, seed: int = 0, **save: Any) -> Any:
    """Save the model of a case with weights large enough that every part matters; returns it."""
    cls, config = (CASES | MORE)[name]
    return make(cls(config()), out, seed, **save)


def make(model: Any, out: Path, seed: int = 0, std: float = 0.2, **save: Any) -> Any:
    """The same for a model of transformers."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        norm = parameter.dim() == 1 and key.endswith("weight")
        parameter.data = norm + std * torch.randn(parameter.shape, generator=generator)
    model.tie_weights()
    model.save_pretrained(out, **save)
    return model
