"""Every file in configs/ loads, keeps every rule, fits its GPUs, and trains two steps when scaled down."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megaponder.config.gpus import DEFAULT_GPU, GPUS
from megaponder.config.load import load_config
from megaponder.config.resolve import resolve
from megaponder.config.rules import check
from megaponder.plan.build import build_plan
from megaponder.ponder.facts import facts_of
from megaponder.ponder.settings import method_of
from tests.data_pipeline.make import random_documents, write_documents
from tests.distributed import run_workers
from tests.scaled import STEPS, VOCAB, scaled

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
WORLD = {"pythia-1.4b-ponderlm-300b": 64, "demo": 1}
"""GPUs that a file is meant for; the others: one node of eight."""
SIZES = ("70m", "160m", "410m", "1b", "1.4b", "2.8b"), ("125m", "410m", "834m", "1.4b", "2.8b")


def test_the_promised_files_are_there() -> None:
    names = {path.stem for path in CONFIGS}
    for family, sizes in zip(("pythia", "llama"), SIZES, strict=True):
        for method in ("vanilla", "ponderlm"):
            assert {f"{family}-{size}-{method}" for size in sizes} <= names
    adaptive = {"ponderlm2", "ponderlm3", "adaponderlm", "adaptive_cot"}
    assert {f"tiny-{method}" for method in adaptive} <= names
    assert all(any(n.endswith(f"m-{method}") for n in names) for method in adaptive)
    assert {"llama-1.4b-loop", "llama-1.4b-pause", "demo", "pythia-1.4b-ponderlm-300b"} <= names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_it_keeps_the_rules_and_fits(path: Path) -> None:
    cfg = resolve(load_config(path, []))
    method = method_of(cfg)
    world = 1 if path.stem.startswith("tiny-") else WORLD.get(path.stem, 8)
    facts = facts_of(method)
    check(cfg, facts, world)
    plan = build_plan(cfg, method, facts, world, 0.4, GPUS[DEFAULT_GPU])
    assert max(stage.total for stage in plan.stages) / 2**30 < GPUS[DEFAULT_GPU].memory_gib * 0.9
    if path.stem != "demo" and not path.stem.startswith("tiny-"):
        # names tell the truth, and nothing that matters is left to a default that may change
        preset, _, rest = path.stem.partition(f"-{cfg.ponder.method}")
        assert (cfg.model.preset, rest) in ((preset, ""), (preset, "-300b"), (preset, "-gentle"))
        text = path.read_text()
        for name in ("optimizer.lr", "optimizer.weight_decay", "train.global_batch", "precision.dtype"):
            assert name.rpartition(".")[2] + ":" in text
        assert cfg.run == f"runs/{path.stem}"


def train_all(folder: str, dataset: str) -> dict[str, list[dict[str, Any]]]:
    """In a worker: two steps of every configuration; the rows of its metrics by file.

    Files that differ in size alone are one run once they are scaled down: it is trained once.
    """
    from megaponder.training.job import train

    done: dict[str, Path] = {}
    rows = {}
    for path in CONFIGS:
        cfg = scaled(path, Path(folder) / path.stem, dataset)
        same = json.dumps(asdict(cfg) | {"run": None, "optimizer": asdict(cfg.optimizer) | {"lr": None}}, default=str)
        if same not in done:
            train(cfg)
            done[same] = Path(cfg.run)
        rows[path.stem] = [json.loads(line) for line in (done[same] / "metrics.jsonl").read_text().splitlines()]
        saved = done[same] / "checkpoints" / f"step_{STEPS:08d}"
        assert (saved / "state.json").is_file() and load_config(saved / "config.yaml", []).train.steps == STEPS
    return rows


def test_every_configuration_trains_two_steps(tmp_path: Path) -> None:
    dataset = write_documents(tmp_path / "text", random_documents([7, 30, 2, 19] * 12, vocab=VOCAB - 1))
    rows = run_workers(
        "tests.test_configs:train_all", 1, args={"folder": str(tmp_path), "dataset": dataset}, timeout=1500
    )[0]
    assert sorted(rows) == sorted(path.stem for path in CONFIGS)
    for name, series in rows.items():
        losses = [row["loss"] for row in series if "loss" in row]
        assert len(losses) == STEPS, name
        # untrained: near the uniform loss
        assert all(math.isfinite(x) and abs(x - math.log(VOCAB)) < 1.0 for x in losses), (name, losses)
        assert math.isfinite(series[-1]["validation_loss"]), name
