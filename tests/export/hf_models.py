"""Random Hugging Face folders of the three families, with odd settings."""

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
    Qwen3Config,
    Qwen3ForCausalLM,
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
GPT2 = dict(vocab_size=71, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=3, eos_token_id=3)


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


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
    "gpt2": (GPT2LMHeadModel, lambda: GPT2Config(**GPT2)),
    "gpt2_untied": (
        GPT2LMHeadModel,
        lambda: GPT2Config(**GPT2, n_inner=60, layer_norm_epsilon=0.1, tie_word_embeddings=False),
    ),
}


def write(name: str, out: Path, seed: int = 0, **save: Any) -> Any:
    """Save the model of a case with weights large enough that every part matters; returns it."""
    cls, config = CASES[name]
    model = cls(config()).eval()
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        norm = parameter.dim() == 1 and key.endswith("weight")
        parameter.data = norm + 0.2 * torch.randn(parameter.shape, generator=generator)
    model.tie_weights()
    model.save_pretrained(out, **save)
    return model
