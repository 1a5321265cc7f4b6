"""Small random models for the export tests: odd shapes, all families and methods."""

from __future__ import annotations

from typing import Any

import torch

from megaponder.export.modeling_megaponder import MegaponderConfig, MegaponderForCausalLM

VOCAB = 61

METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "loop": {"extra_passes": 2},
    "pause": {"pauses": 2, "pause_token_id": 60},
    "huginn": {"prelude": 1, "coda": 0, "recurrence": 3, "kept": 1, "draw": "fixed", "noise_seed": 3},
    "nanbeige": {"loops": 2, "norm_between": True},
    "parcae": {
        "prelude": 1,
        "coda": 0,
        "recurrence": 3,
        "draw_to": 0,
        "kept": 1,
        "noise_seed": 2,
        "value_embeddings": True,
    },
    "ouro": {"loops": 3, "threshold": 0.7},
    "ponderlm": {"steps": 2},
    "ponderlm_top": {"steps": 2, "topk": 5, "multiply_by_steps": True},
    # thresholds by which the tokens of `ids` halt at different depths
    "ponderlm2": {"latents": 2, "jacobi": 2},
    "ponderlm3": {"latents": 3, "jacobi": 2, "target": 0.0, "threshold": 0.3},
    "adaponderlm": {"steps": 3, "target": 0.0, "threshold": 0.5, "topk": 9, "gate_width": 2},
    "adaptive_cot": {"steps": 3, "target": 0.0, "threshold": 0.3},
}
RELATED: dict[str, dict[str, Any]] = {
    "retrofit": {"prelude": 1, "coda": 0, "recurrence": 3, "kept": 1, "draw": "fixed", "noise_seed": 5},
    "pruned_ponderlm": {"steps": 3, "depth": 2.4},
    "confident_ponderlm": {"steps": 2, "target": 0.0, "threshold": 0.06, "topk": 7},
}
"""Methods that share their parts with one of the others."""
EVERY = (*METHODS, *RELATED)
PASSES = {
    "loop": 3,
    "huginn": 3,
    "ouro": 3,
    "nanbeige": 2,
    "parcae": 3,
    "ponderlm": 3,
    "ponderlm_top": 3,
    "adaponderlm": 4,
    "adaptive_cot": 4,
}
"""Passes with keys of their own; 1 where none are named."""
HALTING = ("adaponderlm", "adaptive_cot")
"""Methods whose tokens may stop before the deepest pass."""
LATENT = ("ponderlm2", "ponderlm3")
"""Methods whose training forward approximates their decoding."""
FAMILIES: dict[str, dict[str, Any]] = {
    "pythia": {"rotary_fraction": 0.5, "parallel_residual": True, "intermediate_size": 40},
    "llama": {
        "rotary_fraction": 1.0,
        "rotary_base": 5e5,
        "num_key_value_heads": 2,
        "norm_eps": 0.1,
        "intermediate_size": 52,
    },
    "gpt2": {"intermediate_size": 56, "tie_word_embeddings": True},
}


def config(family: str, method: str, **changes: Any) -> MegaponderConfig:
    """A model of 2 layers, width 32 and a vocabulary that is a multiple of nothing."""
    fields = dict(
        family=family,
        method=method.removesuffix("_top"),
        method_options=(METHODS | RELATED).get(method, {}),
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        embedding_scale=1.0 if method == "vanilla" else 32**0.5,
        eos_token_id=0,
    )
    return MegaponderConfig(**{**fields, **FAMILIES[family], **changes})


def model(family: str, method: str, seed: int = 0, **changes: Any) -> MegaponderForCausalLM:
    """The model with random weights large enough that every part of it matters, routers and gates above all."""
    net = MegaponderForCausalLM(config(family, method, **changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        bias = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        scale = 0.12 if "embed" in name or "lm_head" in name else 0.2
        if name.startswith("method."):
            scale = 0.3 if parameter.dim() == 1 else 2.0 * parameter.shape[-1] ** -0.5
        parameter.data = bias + noise * scale
    net.tie_weights()
    return net


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random token ids, none of them the EOD (0) nor the pause token."""
    return torch.randint(1, VOCAB - 1, shape, generator=torch.Generator().manual_seed(seed))
