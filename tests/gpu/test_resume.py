"""Runs on GPUs go on from their checkpoints: in each precision, from one precision to another, at another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaponder.checkpoint import reader
from megaponder.monitor.jsonl import read
from tests.distributed import run_workers
from tests.gpu.test_capture import PRECISIONS
from tests.training.conftest import Base

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FP32 = {"precision__implementation": "local"}
BF16 = {"precision__implementation": "te", "precision__dtype": "bf16", "parallel__distributed_optimizer": True}
MODES: dict[str, dict[str, Any]] = {
    "fp32": FP32,
    "bf16": BF16,
    "delayed": BF16 | {"precision__fp8": "delayed"},
    "blockwise": BF16 | {"precision__fp8": "blockwise"},
    "muon": BF16 | {"optimizer__kind": "muon", "train__z_loss": 1e-3},  # ranks share matrices out
    "layers-of-pytorch": BF16 | {"precision__implementation": "local"},
}
MOVES = [
    ("bf16", "delayed"),
    ("delayed", "bf16"),
    ("bf16", "blockwise"),
    ("bf16", "layers-of-pytorch"),  # nothing of a version of Transformer Engine is in a checkpoint
    ("layers-of-pytorch", "bf16"),
    ("delayed", "fp32"),
    ("fp32", "bf16"),
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-sp": {"parallel__tensor": 2, "parallel__sequence": True},
    "pp2": {"parallel__pipeline": 2},
    "dp2": {"train__micro_batch": 2},
}
MODEL = {
    "model__hidden_size": 64, "model__num_heads": 4, "model__num_kv_heads": 4, "model__ffn_size": 128,
    "model__vocab_size": 96, "ponder__method": "adaponderlm", "ponder__options": {"steps": 2, "target": 0.0},
    "data__sequence_length": 32, "train__global_batch": 8, "train__micro_batch": 4, "train__eval_batches": 1,
}  # fmt: skip
"""Sizes that FP8 and the fused kernels accept."""


def job(root: Path, name: str, source: str | None = None, **changes: Any) -> dict[str, Any]:
    """A run of its own, or one that continues a copy of another's checkpoint of step 3."""
    own = Base(root, "").copy(name, source=source) if source else {"run": str(root / name), "data": str(root)}
    return own | MODEL | changes


def losses(root: Path, name: str) -> list[float]:
    rows = {r["step"]: r["loss"] for r in read(root / name / "metrics.jsonl")}
    assert sorted(rows) == list(range(1, 9))
    return [rows[step] for step in range(1, 9)]


def train(world: int, jobs: list[dict[str, Any]]) -> None:
    run_workers("tests.gpu.workers:train", world, args={"jobs": jobs}, timeout=300)


def tensors(root: Path, name: str) -> dict[str, tuple[int, ...]]:
    shapes = reader.shapes(root / name / "checkpoints" / "step_00000008")
    return {key: shape for key, shape in shapes.items() if not key.startswith("random.")}


def scales(root: Path, name: str) -> dict[str, Any]:
    """FP8's scales and histories in the last checkpoint."""
    path = root / name / "checkpoints" / "step_00000008"
    return reader.read(path, {n: m for n, m in reader.tensors(path).items() if n.startswith("fp8.")})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole run in each mode."""
    from tests.training import datasets

    root = tmp_path_factory.mktemp("gpu-resume")
    datasets.write(root / "train", tokens=24 * 32 + 1, seed=1)
    datasets.write(root / "valid", tokens=800, seed=2)
    train(1, [job(root, name, **mode) for name, mode in MODES.items()])
    return root


def test_the_runs_learn_and_differ(root: Path) -> None:
    """Else a run that began anew, or in another precision, would pass for one that goes on."""
    for name in MODES:
        found = losses(root, name)
        assert found[0] - found[-1] > 0.2, name
    assert losses(root, "delayed") != losses(root, "bf16") != losses(root, "fp32")


@pytest.fixture(scope="module")
def resumed(root: Path) -> Path:
    """Each mode from its own checkpoint, and each move from one to another."""
    same = [job(root, f"{name}-again", name, **mode) for name, mode in MODES.items()]
    moved = [job(root, f"{a}-to-{b}", a, **MODES[b]) for a, b in MOVES]
    train(1, [*same, *moved])
    return root


@pytest.mark.parametrize("name", MODES)
def test_a_run_goes_on(resumed: Path, name: str) -> None:
    want = PRECISIONS.get(name, PRECISIONS["bf16"])
    np.testing.assert_allclose(losses(resumed, f"{name}-again"), losses(resumed, name), rtol=want)


def test_the_scales_of_fp8_go_on(resumed: Path) -> None:
    """The canary fills a lost history too, but not with what the first steps, before the checkpoint, had seen."""
    whole, again = scales(resumed, "delayed"), scales(resumed, "delayed-again")
    histories = [name for name in whole if name.endswith(".amax_history")]
    assert len(histories) == 16 and len(whole) == 32  # 2 layers of 4 matrices, forward and backward
    assert whole.keys() == again.keys()
    for name in histories:
        before = whole[name][6:11]  # of 16 entries, the newest last: 2 fills and steps 1 to 3, then steps 4 to 8
        assert (before[:, 0] > 0).all() and len(before[:, 0].unique()) > 2
        assert torch.equal(again[name][6:11], before)
    for name in ("bf16", "blockwise", "delayed-to-bf16"):
        assert not scales(resumed, name)


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_run_goes_on_in_another_precision(resumed: Path, before: str, after: str) -> None:
    name = f"{before}-to-{after}"
    found = losses(resumed, name)
    np.testing.assert_allclose(found, losses(resumed, before), rtol=PRECISIONS["delayed"])
    assert found[:3] == losses(resumed, before)[:3] and found[3:] != losses(resumed, before)[3:]
    assert tensors(resumed, name) == tensors(resumed, after)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "delayed", "muon"])
def test_another_layout_goes_on(root: Path, mode: str) -> None:
    train(2, [job(root, f"{mode}-{n}", mode, **MODES[mode] | layout) for n, layout in LAYOUTS.items()])
    back = [Base(root, "").copy(f"{mode}-{n}-back", source=f"{mode}-{n}", upto=6) for n in LAYOUTS]
    train(1, [copy | MODEL | MODES[mode] for copy in back])
    for name in LAYOUTS:
        for found in (f"{mode}-{name}", f"{mode}-{name}-back"):
            want = PRECISIONS.get(mode, PRECISIONS["bf16"])
            np.testing.assert_allclose(losses(root, found), losses(root, mode), rtol=want, err_msg=found)
