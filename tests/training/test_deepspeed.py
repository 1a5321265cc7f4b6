"""DeepSpeed trains as megatron-core does, and each engine continues what the other has saved."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from megaponder.checkpoint import folder, reader
from tests.distributed import Workers
from tests.training.conftest import HERE, Base, run
from tests.training.test_resume import assert_overlays

pytest.importorskip("deepspeed")
ENGINE: dict[str, Any] = {"train__engine": "deepspeed", "optimizer__ema_decay": 0.0}
STAGES: dict[str, dict[str, Any]] = {
    "stage0": {"parallel__zero_stage": 0},
    "stage1": {"parallel__zero_stage": 1, "parallel__overlap_grad_reduce": True},
    "stage2": {"parallel__zero_stage": 2, "checkpoint__asynchronous": True},
    "stage2-offload": {"parallel__zero_stage": 2, "parallel__offload": "optimizer"},
    "stage3": {"parallel__zero_stage": 3},
    "stage3-offload": {"parallel__zero_stage": 3, "parallel__offload": "weights"},
}


def stored(run: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in the last checkpoint but random states, which each rank has."""
    path = folder.final(run / "checkpoints", 8)
    return {name: shape for name, shape in reader.shapes(path).items() if not name.startswith("random.")}


def test_each_engine_continues_the_others_checkpoints(base: Base):
    there = [base.copy(f"zero-{name}") | ENGINE | changes for name, changes in STAGES.items()]
    _, output = run("run_many", 2, jobs=there)
    assert "Resuming from checkpoint" in output
    for name in STAGES:
        assert_overlays(base, f"zero-{name}")
        assert stored(base.root / f"zero-{name}") == {n: s for n, s in stored(base.run).items() if "ema" not in n}
    back = [base.copy(f"back-{name}", source=f"zero-{name}", upto=6) for name in STAGES]
    back[-1] |= ENGINE | STAGES["stage1"]  # another stage
    run("run_many", 2, jobs=[job | {"optimizer__ema_decay": 0.0} for job in back])
    for name in STAGES:
        assert_overlays(base, f"back-{name}")


def test_signals_and_kills_are_as_with_the_first_engine(base: Base):
    """SIGTERM to one rank saves and ends both with its code; SIGKILL loses what was not saved; a start continues."""
    job = base.copy("zero-signal") | ENGINE | STAGES["stage3"]
    codes, output = run("run_and_signal", 2, at_step=5, number=signal.SIGTERM, rank=1, **job)
    assert codes == [143, 143] and "Stopped by SIGTERM after step 5; it is saved." in output
    assert max(folder.published(base.root / "zero-signal" / "checkpoints")) == 5
    workers = Workers(f"{HERE}:run_and_signal", 2, {"at_step": 7, "number": signal.SIGKILL, "rank": None} | job)
    try:
        assert set(workers.join()) == {-signal.SIGKILL}
    finally:
        workers.kill()
    _, output = run("run_train", 2, **job)
    assert "step_00000006" in output
    assert_overlays(base, "zero-signal")
