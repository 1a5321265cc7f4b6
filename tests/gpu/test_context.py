"""Two ranks that share sequences are as near to FP32 in BF16 as ranks with sequences of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_workers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "plain": ("llama", "vanilla", {}, False),  # Transformer Engine's own exchange of keys and values
    "rows": ("llama", "ponderlm2", {}, False),
    "key-bias": ("llama", "ponderlm3", {"latents": 2, "target": 0.0}, False),  # fused calls, merged
    "key-sets": ("llama", "adaptive_cot", {"target": 0.0}, False),
    "kept-keys": ("pythia", "adaponderlm", {"target": 0.0}, False),
    "documents": ("llama", "loop", {"extra_passes": 1}, True),  # masks
}


@pytest.fixture(scope="module")
def found() -> Any:
    pytest.importorskip("transformer_engine")
    return run_workers("tests.gpu.workers:compare_contexts", 2, args={"cases": CASES})[0]


@pytest.mark.parametrize("implementation", ["te", "local"])
@pytest.mark.parametrize("case", CASES)
def test_shared_sequences(found: Any, case: str, implementation: str) -> None:
    got = found[case]
    print(got)
    assert got[implementation]["loss"] == pytest.approx(got["fp32"]["loss"], rel=1e-2)
    assert got["apart"]["error"] > 0 and got[implementation]["error"] < max(1.5 * got["apart"]["error"], 2e-2)
