"""SFT runs: the same losses in every layout, and after a kill as without one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from megaponder.checkpoint import folder
from megaponder.monitor.jsonl import read
from tests.data_pipeline.make import write_conversations
from tests.distributed import Workers
from tests.tolerance import RTOL
from tests.training import datasets
from tests.training.conftest import HERE, run

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"parallel__distributed_optimizer": True, "train__micro_batch": 1},
    "tp2-sp": {"parallel__tensor": 2, "parallel__sequence": True},
    "pp2": {"parallel__pipeline": 2},
    "cp2": {"parallel__context": 2},
}
try:
    import deepspeed  # noqa: F401

    LAYOUTS["deepspeed"] = {"train__engine": "deepspeed", "parallel__zero_stage": 2, "optimizer__ema_decay": 0.0}
except ImportError:
    pass


def job(root: Path, name: str) -> dict[str, Any]:
    """Two epochs; held-out conversations and texts."""
    return {
        "run": str(root / name), "data": str(root), "data__train": [str(root / "talks")],
        "data__valid": {"answers": [str(root / "talks")], "general": [str(root / "valid")]},
        "data__loss_mask": "answers", "train__steps": None, "train__epochs": 2,
    }  # fmt: skip


def losses(root: Path, name: str) -> dict[int, list[float]]:
    rows = {row["step"]: row for row in read(root / name / "metrics.jsonl")}
    keys = ("loss", "validation_loss", "validation_loss_answers", "validation_loss_general")
    return {step: [row[key] for key in keys if key in row] for step, row in rows.items()}


def test_layouts_and_kill_9(tmp_path: Path) -> None:
    write_conversations(tmp_path / "talks", 18, 20, seed=3)
    datasets.write(tmp_path / "valid", tokens=200, seed=2)
    _, output = run("run_train", 1, **job(tmp_path, "one"))
    assert "talks: 18 conversations fill" in output and "longer than a sequence and are cut" in output
    expected = losses(tmp_path, "one")
    assert max(expected) >= 7 and len(expected[4]) == 4
    killed = job(tmp_path, "killed")
    workers = Workers(f"{HERE}:run_and_signal", 1, {"at_step": 5, "number": signal.SIGKILL, "rank": None} | killed)
    try:
        assert workers.join() == [-signal.SIGKILL]
    finally:
        workers.kill()
    assert max(folder.published(tmp_path / "killed" / "checkpoints")) == 3
    jobs = [job(tmp_path, name) | changes for name, changes in LAYOUTS.items()]
    run("run_many", 2, jobs=[*jobs, killed])
    for name in (*LAYOUTS, "killed"):
        found = losses(tmp_path, name)
        assert found.keys() == expected.keys(), name
        for step, values in expected.items():
            assert found[step] == pytest.approx(values, rel=RTOL), (name, step)
