"""What FP8 does before its first step, where no GPU is needed (`tests/gpu/test_fp8.py` has the rest)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed import run_workers
from tests.training import datasets


def fills(job: dict[str, Any]) -> list[int]:
    """How often each case runs the first batch on this rank: no stage has a history, only the last lacks one, none."""
    from tests.checkpoint.test_scales import with_fp8

    cfg, engine, _ = with_fp8(job, 3)
    from megaponder.training.canary import check_fp8

    cfg.precision.fp8_canary = 0
    runs = [0]
    engine.forward_backward = lambda *args, **kwargs: runs.append(runs.pop() + 1)
    fp8, counts = engine.stage.fp8, []
    modules = fp8._modules
    for layers, value in ((modules, 0.0), ({} if engine.groups.pp_rank == 0 else modules, 0.0), (modules, 1.0)):
        fp8._modules = layers
        fp8.allocate()
        for scale in fp8.scales().values():
            scale.fill_(value)
        runs[:] = [0]
        check_fp8(cfg, engine, [], print)
        counts.append(runs[0])
    return counts


def test_all_stages_fill_histories_together(tmp_path: Path) -> None:
    """A stage of BF16 layers alone would otherwise wait for those that have a history, for ever."""
    for name in ("train", "valid"):
        datasets.write(tmp_path / name, tokens=400, seed=1)
    job = {"run": str(tmp_path / "run"), "data": str(tmp_path), "parallel__pipeline": 2}
    assert run_workers("tests.training.test_canary:fills", 2, args={"job": job}, timeout=600) == [[2, 2, 0]] * 2
