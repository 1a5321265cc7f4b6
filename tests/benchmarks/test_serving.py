"""Engines that serve exports, where they are installed: MEGAPONDER_VLLM and MEGAPONDER_MLX name the Python of an
environment with each, MEGAPONDER_LLAMA llama.cpp's source folder and a build of it, separated by a colon."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serving
from tests.external import EXTERNAL


def rounding(engine: str, row: dict[str, Any]) -> float:
    """Largest difference of log-probabilities in FP32; another formula of GELU than ours costs more."""
    gelu = not engine.startswith("vllm") and row["family"] != "llama"
    return 3e-4 * row["span"] if gelu else max(1e-4, 5 * row["itself"])


@EXTERNAL
@pytest.mark.parametrize("engine", ["vllm", "mlx", "llama"])
def test_engine(engine: str, tmp_path: Path) -> None:
    found = os.environ.get(f"MEGAPONDER_{engine.upper()}")
    if found is None:
        pytest.skip(f"MEGAPONDER_{engine.upper()} is not set")
    assert serving.main([f"--{engine}", *found.split(":"), "--output", str(tmp_path)]) == 0
    for row in json.loads((tmp_path / "serving.json").read_text()):
        if (engine, row["family"]) == ("mlx", "gpt2"):
            assert "failed" in row  # it wants other names than transformers writes
            continue
        assert row["difference"] <= rounding(engine, row) and row["same"] == row["texts"], row
