"""Weights of the official code (Hugging Face names) under the names of a one-process stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "fixtures" / "official"


def load(name: str) -> dict[str, Tensor]:
    """Everything in a fixture: w/<name>, g/<name>, ids, logits, loss."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as f:
        return {k: torch.tensor(f[k]) for k in f.files}


def _grouped_qkv(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Separate projections -> per head q, k, v."""
    parts = [t.view(heads, -1, t.shape[-1]) for t in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def llama_to_stage(w: dict[str, Tensor], layers: int, heads: int) -> dict[str, Tensor]:
    """w: names without the `w/` or `g/` prefix; works for weights and for gradients."""
    out = {
        "embedding.word_embeddings.weight": w["model.embed_tokens.weight"],
        "final_norm.weight": w["model.norm.weight"],
        "output_layer.weight": w["lm_head.weight"],
    }
    for i in range(layers):
        old, new = f"model.layers.{i}.", f"decoder.layers.{i}."
        qkv = (w[f"{old}self_attn.{x}_proj.weight"] for x in "qkv")
        out[f"{new}self_attention.linear_qkv.weight"] = _grouped_qkv(*qkv, heads=heads)
        out[f"{new}self_attention.linear_proj.weight"] = w[f"{old}self_attn.o_proj.weight"]
        out[f"{new}mlp.linear_fc1.weight"] = torch.cat([w[f"{old}mlp.{x}_proj.weight"] for x in ("gate", "up")])
        out[f"{new}mlp.linear_fc2.weight"] = w[f"{old}mlp.down_proj.weight"]
        out[f"{new}input_layernorm.weight"] = w[f"{old}input_layernorm.weight"]
        out[f"{new}pre_mlp_layernorm.weight"] = w[f"{old}post_attention_layernorm.weight"]
    return out


def neox_to_stage(w: dict[str, Tensor], layers: int, heads: int) -> dict[str, Tensor]:
    """GPT-NeoX stores q, k, v per head already."""
    out = {
        "embedding.word_embeddings.weight": w["gpt_neox.embed_in.weight"],
        "final_norm.weight": w["gpt_neox.final_layer_norm.weight"],
        "final_norm.bias": w["gpt_neox.final_layer_norm.bias"],
        "output_layer.weight": w["embed_out.weight"],
    }
    names = {
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
    }
    for i in range(layers):
        for new, old in names.items():
            for part in ("weight", "bias"):
                out[f"decoder.layers.{i}.{new}.{part}"] = w[f"gpt_neox.layers.{i}.{old}.{part}"]
    return out
