"""FP8's scales in checkpoints: to another layout, to a run without FP8, and left where they do not fit.

Transformer Engine wants a GPU (`tests/gpu/test_resume.py` runs it); here something with its layers' attributes holds
the numbers.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaponder.checkpoint import folder, reader
from tests.distributed import run_workers
from tests.training import datasets

ROWS = 3
"""Entries of an amax history, of which the k-th row of layer i holds 10 i + k."""


class Linear:
    """The state of delayed scaling as Transformer Engine's linear layers keep it."""

    def __init__(self, rows: int):
        self.fp8_meta: dict[str, Any] = {}
        self.rows = rows

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        import torch

        for kind in ("scaling_fwd", "scaling_bwd"):
            self.fp8_meta.setdefault(kind, SimpleNamespace(scale=torch.ones(2), amax_history=torch.zeros(self.rows, 2)))


def with_fp8(job: dict[str, Any], rows: int) -> Any:
    """(configuration, engine, optimizer), its stage with scales of so many rows, or without FP8 if there are none."""
    from megaponder.engine import groups as process_groups
    from megaponder.training import setup
    from tests.training.workers import config

    cfg = setup.complete(config(**job))
    groups = process_groups.init(cfg)
    from megaponder.engine.build import build_engine
    from megaponder.engine.fp8 import Fp8
    from megaponder.ponder.settings import method_of
    from megaponder.training.optimizer import build_optimizer

    engine = build_engine(cfg, method_of(cfg), groups)
    if rows:
        fp8 = Fp8.__new__(Fp8)
        fp8._delayed, fp8._recipe = True, None
        fp8._modules = {f"layers.{layer.layer_number - 1}.proj": Linear(rows) for layer in engine.stage.decoder.layers}
        engine.stage.fp8 = fp8
    return cfg, engine, build_optimizer(cfg, engine.ddp)


def save(job: dict[str, Any]) -> None:
    """A checkpoint of step 1, whose scales tell their layers."""
    from megaponder.checkpoint.save import Saver
    from megaponder.checkpoint.state import TrainState

    cfg, engine, optimizer = with_fp8(job, ROWS)
    fp8 = engine.stage.fp8
    fp8.allocate()
    for name, value in fp8.scales().items():
        number = 10 * int(name.split(".")[1])
        for k, row in enumerate(value):
            row.fill_(number + k)
    saver = Saver(Path(cfg.run) / "checkpoints", cfg, engine.stage, optimizer, {})
    saver.save(TrainState(step=1))
    saver.wait()


def resumed(job: dict[str, Any], rows: int) -> dict[str, list[Any]]:
    """The scales after the checkpoint was loaded."""
    from megaponder.checkpoint import restore

    cfg, engine, optimizer = with_fp8(job, rows)
    assert restore.resume(folder.final(Path(cfg.run) / "checkpoints", 1), engine.stage, optimizer).step == 1
    return {n: v.tolist() for n, v in engine.stage.fp8.scales().items()} if rows else {}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("scales")
    for name in ("train", "valid"):
        datasets.write(root / name, tokens=400, seed=1)
    (root / "run" / "checkpoints").mkdir(parents=True)
    job = {"run": str(root / "run"), "data": str(root)}
    run_workers("tests.checkpoint.test_scales:save", 2, args={"job": job | {"parallel__pipeline": 2}})
    return job


def test_they_are_plain_tensors_by_layer(saved: dict[str, Any]) -> None:
    path = folder.final(Path(saved["run"]) / "checkpoints", 1)
    names = {name for name in reader.tensors(path) if name.startswith("fp8.")}
    assert len(names) == 8 and "fp8.layers.1.proj.scaling_bwd.amax_history" in names
    assert not names & set(reader.parameters(path))


def test_another_layout_has_them(saved: dict[str, Any]) -> None:
    (found,) = run_workers("tests.checkpoint.test_scales:resumed", 1, args={"job": saved, "rows": ROWS})
    assert len(found) == 8
    for name, values in found.items():
        first = 10 * int(name.split(".")[1])
        want = [first, first + 1] if name.endswith(".scale") else [[first + k] * 2 for k in range(ROWS)]
        assert values == want, name


@pytest.mark.parametrize("rows", [0, ROWS + 1], ids=["without FP8", "another length"])
def test_what_does_not_fit_is_left(saved: dict[str, Any], rows: int) -> None:
    (found,) = run_workers("tests.checkpoint.test_scales:resumed", 1, args={"job": saved, "rows": rows})
    assert all(v == [1, 1] if n.endswith(".scale") else v == [[0, 0]] * rows for n, v in found.items())
