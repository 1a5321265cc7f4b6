"""FP8 layers: near BF16, and weights quantised once a step, anew after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_workers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "pythia": ("pythia", {}),
    "qk-norm": ("qwen3", {"num_kv_heads": 2}),
    "sandwich": ("llama", {"norm_placement": "sandwich"}),
    "freqkv": ("llama", {"num_kv_heads": 2, "freqkv": {"capacity": 40}}),
    "depth": ("llama", {"num_kv_heads": 2, "depth_attention": {"sources": "all"}}),
    "post-norm-all-heads": ("llama", {"norm_placement": "post", "qk_norm": "all", "num_kv_heads": 2}),
    "stream-norm-qk-bias": ("llama", {"norm_placement": "stream", "qkv_bias": "qk", "rotary_pairs": "adjacent"}),
    "rotated-norm-relu2": ("pythia", {"qk_norm": "rotated", "rotary_pairs": "adjacent", "activation": "relu2"}),
}


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
@pytest.mark.parametrize("name", FEATURES)
def test_fp8_is_near_bf16(recipe: str, name: str) -> None:
    """Bounds: E4M3 has 3 bits of mantissa and E5M2 2, so products are off by some percent, means by much less."""
    pytest.importorskip("transformer_engine")
    family, features = FEATURES[name]
    got = run_workers(
        "tests.gpu.workers:compare_fp8", 1, args={"recipe": recipe, "family": family, "features": features}
    )[0]
    print(got)
    assert got["loss_error"] < 1e-2
    assert 1e-3 < got["gradient_error"] < 0.2  # not equal: FP8 really ran


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_weights_are_quantised_once_a_step(recipe: str) -> None:
    pytest.importorskip("transformer_engine")
    got = run_workers("tests.gpu.workers:watch_fp8_weights", 1, args={"recipe": recipe})[0]
    print(got)
    assert got["weights"] > 0 and got["passes"] == 3
    assert got["changed_within_step"] == 0
    assert got["changed_after_step"] == got["weights"]
    assert got["scales_changed_within_step"] == 0


@pytest.mark.parametrize("options", [{"target": 0.0}, {"target": 0.6}], ids=["gates", "budget"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_gathered_rows_are_multiples_of_16(recipe: str, options: dict[str, Any]) -> None:
    pytest.importorskip("transformer_engine")
    rows = run_workers("tests.gpu.workers:gathered_fp8", 1, args={"recipe": recipe, "options": options})[0]
    assert 32 in rows and all(n % 16 == 0 for n in rows)  # 34 places before


def test_first_and_last_layers_stay_in_bf16() -> None:
    pytest.importorskip("transformer_engine")
    got = run_workers("tests.gpu.workers:layers_in_fp8", 1, args={"edge": 1})[0]
    assert got == [False, True, True, False]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_start_compares_fp8_with_bf16(recipe: str) -> None:
    pytest.importorskip("transformer_engine")
    got = run_workers("tests.gpu.workers:start_in_fp8", 1, args={"recipe": recipe})[0]
    assert "apart" in got["said"][0]
    assert "fp8_canary allows 1e-12" in got["refused"] and "fp8_bf16_layers" in got["refused"]
    assert got["gradients"] == 0.0  # what filled the amax history is gone


def test_amax_metrics_are_of_the_last_step() -> None:
    pytest.importorskip("transformer_engine")
    got = run_workers("tests.gpu.workers:fp8_amax", 1)[0]
    assert got["before"] == got["other"] == {}
    after = got["after"]
    assert after["fp8_amax_weight"] == got["weights"]
    assert 0 < after["fp8_amax_grad"] < after["fp8_amax_input"] < 1e3
