"""`megaponder train` on GPUs captures its passes on a machine's first run too, and returns.

Captured passes hold calls of NCCL, which waits for them when groups end.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import run_workers
from tests.gpu.test_resume import BF16, LAYOUTS, MODEL, losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_a_first_run_captures_and_ends(tmp_path: Path, layout: str) -> None:
    from tests.training import datasets

    datasets.write(tmp_path / "train", tokens=24 * 32 + 1, seed=1)
    datasets.write(tmp_path / "valid", tokens=800, seed=2)
    world, changes = (1, {}) if layout == "alone" else (2, LAYOUTS[layout])
    job = {"run": str(tmp_path / "run"), "data": str(tmp_path)} | MODEL | BF16 | changes
    args = {"job": job, "compiled": str(tmp_path / "compiled")}
    codes = run_workers("tests.gpu.workers:whole_command", world, args=args, timeout=150)
    assert codes == [0] * world and len(losses(tmp_path, "run")) == 8
