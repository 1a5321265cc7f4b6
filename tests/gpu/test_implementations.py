"""Transformer Engine's layers against PyTorch's: same weights, same loss and gradients up to BF16 rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_workers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [
    ("pythia", "ponderlm", {"steps": 2}),
    ("llama", "loop", {"extra_passes": 2}),
    ("gpt2", "vanilla", {}),
    ("llama", "ponderlm2", {}),
    ("llama", "ponderlm3", {"latents": 2, "target": 0.0}),
    ("pythia", "adaponderlm", {"target": 0.0}),
    ("llama", "adaptive_cot", {"target": 0.0}),
    ("llama", "parcae", {"prelude": 1, "coda": 1, "recurrence": 2, "draw_to": 0, "kept": 2, "value_embeddings": True}),
]
WINDOWED = [
    ("pause", {"pauses": 2, "pause_token_id": 900}),
    ("ponderlm3", {"latents": 2, "target": 0.0}),
    ("adaptive_cot", {"target": 0.0}),
]
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": (
        "llama",
        {"head_size": 32, "norm": "layernorm", "qkv_bias": True, "activation": "gelu", "mlp_bias": True},
    ),
    "mixed-without-biases": ("pythia", {"qkv_bias": False, "output_bias": False, "mlp_bias": False}),
    "qk-norm": ("qwen3", {"num_kv_heads": 2, "head_size": 128}),
    "sandwich": ("llama", {"norm_placement": "sandwich"}),
    "sandwich-parallel": ("pythia", {"norm_placement": "sandwich"}),
    "post-norm-all-heads": ("llama", {"norm_placement": "post", "qk_norm": "all", "num_kv_heads": 2}),
    "stream-norm-qk-bias": ("llama", {"norm_placement": "stream", "qkv_bias": "qk", "rotary_pairs": "adjacent"}),
    "rotated-norm-relu2": ("pythia", {"qk_norm": "rotated", "rotary_pairs": "adjacent", "activation": "relu2"}),
    "frozen-norms-relu": ("gpt2", {"norm_affine": False, "activation": "relu"}),
    "window-yarn": (
        "mistral",
        {
            "attention_window": 37,
            "num_kv_heads": 2,
            "rotary_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "qk-norm-layernorm": ("pythia", {"qk_norm": "head"}),
    "moe": ("llama", {"num_kv_heads": 2, "moe": {"experts": 4, "top_k": 2, "shared_ffn": 128, "aux_weight": 0.1}}),
    "moe-sigmoid": ("qwen3", {"moe": {"experts": 8, "top_k": 3, "score": "sigmoid", "scale": 2.0, "bias_rate": 0.01}}),
    "moe-routers": ("llama", {"moe": {"experts": 8, "top_k": 3, "score": "sigmoid", "bias_rate": 0.01, "routers": 2}}),
    "freqkv": ("qwen3", {"num_kv_heads": 2, "freqkv": {"capacity": 40}}),
    "depth": ("qwen3", {"num_kv_heads": 2, "depth_attention": {"sources": "all"}}),
    "depth-prob": ("pythia", {"depth_attention": {"sources": "last:3", "query": "mean_prob", "own": "residual"}}),
}


@pytest.mark.parametrize(("family", "method", "options"), [*CASES, ("gpt2", "pause", WINDOWED[0][1])])
def test_documents_in_both_implementations(family: str, method: str, options: dict[str, Any]) -> None:
    test_te_is_as_near_to_fp32_as_pytorch_is(family, method, options, {}, documents=True)


def test_documents_and_a_window_in_both_implementations() -> None:
    test_te_is_as_near_to_fp32_as_pytorch_is("llama", "loop", {}, {"attention_window": 37}, documents=True)


def test_documents_and_freqkv_in_both_implementations() -> None:
    test_te_is_as_near_to_fp32_as_pytorch_is("llama", "loop", {}, {"freqkv": {"capacity": 24}}, documents=True)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("family", "heads"), [("llama", 4), ("llama", 1), ("pythia", 4)])
def test_one_sequence_at_a_time(family: str, heads: int, documents: bool) -> None:
    """Dimensions of size 1 may have any stride, and Transformer Engine looks at strides."""
    options, features = {"extra_passes": 1}, {"num_kv_heads": heads}
    test_te_is_as_near_to_fp32_as_pytorch_is(family, "loop", options, features, documents, at_once=1)


@pytest.mark.parametrize("name", FEATURES)
def test_features_in_both_implementations(name: str) -> None:
    family, features = FEATURES[name]
    test_te_is_as_near_to_fp32_as_pytorch_is(family, "loop", {"extra_passes": 1}, features)


def test_routers_of_slots_in_both_implementations() -> None:
    features = {"moe": {"experts": 4, "top_k": 2, "routers": 2}}
    test_te_is_as_near_to_fp32_as_pytorch_is("llama", "ponderlm2", {}, features)


@pytest.mark.parametrize(("method", "options"), WINDOWED)
def test_a_window_counts_tokens_in_both_implementations(method: str, options: dict[str, Any]) -> None:
    test_te_is_as_near_to_fp32_as_pytorch_is("llama", method, options, {"attention_window": 37})


@pytest.mark.parametrize(("family", "method", "options"), CASES)
def test_te_is_as_near_to_fp32_as_pytorch_is(
    family: str,
    method: str,
    options: dict[str, Any],
    features: dict[str, Any] | None = None,
    documents: bool = False,
    at_once: int = 4,
) -> None:
    pytest.importorskip("transformer_engine")
    args = {"family": family, "method": method, "options": options, "features": features or {}, "documents": documents}
    args["at_once"] = at_once
    got = run_workers("tests.gpu.workers:compare_implementations", 1, args=args)[0]
    print(got)
    assert got["params"]["te"] == got["params"]["fp32"]
    assert got["loss"]["te"] == pytest.approx(got["loss"]["fp32"], rel=1e-2)
    assert got["error"]["local"] > 0 and got["error"]["te"] < max(1.5 * got["error"]["local"], 2e-2)
