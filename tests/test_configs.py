"""Every file in configs/ loads, keeps every rule, fits its GPUs, and trains two steps when scaled down; its folders are
comparisons at equal budgets."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megaponder.config.gpus import DEFAULT_GPU, GPUS
from megaponder.config.load import load_config
from megaponder.config.resolve import resolve
from megaponder.config.rules import check
from megaponder.config.schema import RunConfig
from megaponder.plan.build import build_plan
from megaponder.plan.moe import inactive
from megaponder.plan.parameters import model_parameters
from megaponder.ponder.facts import facts_of
from megaponder.ponder.settings import embedding_scale, initialisation, method_of
from megaponder.training.schedule import build_schedule
from megaponder.upcycle.split import mixture_config
from tests.data_pipeline.make import random_documents, write_documents
from tests.distributed import run_workers
from tests.scaled import STEPS, VOCAB, scaled

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
STAGES, DOMAIN = (sorted((CONFIGS[0].parent / name).glob("*.yaml")) for name in ("innovator", "geogalactica"))
"""Of one training, one after the other."""
SETS = {
    folder.name: sorted(folder.glob("*.yaml"))
    for folder in sorted(CONFIGS[0].parent.iterdir())
    if folder.is_dir() and folder.name not in ("innovator", "geogalactica")
}
"""Folders of files with equal budgets: comparisons of a paper."""
WORLD = {"pythia-1.4b-ponderlm-300b": 64, "demo": 1, "pythia-300b": 64}
"""GPUs that a file (or all of a folder) is meant for; the others: one node of eight."""
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


def assert_fits(path: Path, world: int) -> RunConfig:
    """The file keeps the rules, and its plan fits; the resolved configuration."""
    cfg = resolve(load_config(path, []))
    method = method_of(cfg)
    facts = facts_of(method)
    check(cfg, facts, world)
    plan = build_plan(cfg, method, facts, world, 0.4, GPUS[DEFAULT_GPU])
    assert max(stage.total for stage in plan.stages) / 2**30 < GPUS[DEFAULT_GPU].memory_gib * 0.9
    return cfg


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_it_keeps_the_rules_and_fits(path: Path) -> None:
    cfg = assert_fits(path, 1 if path.stem.startswith("tiny-") else WORLD.get(path.stem, 8))
    if path.stem != "demo" and not path.stem.startswith("tiny-"):
        # names tell the truth, and nothing that matters is left to a default that may change
        preset, _, rest = path.stem.partition(f"-{cfg.ponder.method}")
        rests = ("", "-300b", "-depth", "-documents", "-eslm", "-freqkv", "-gentle", "-sqrt_h", "-sqrt_2.5h")
        assert cfg.model.preset in (preset, None) and rest in rests
        text = path.read_text()
        for name in ("optimizer.lr", "optimizer.weight_decay", "train.global_batch", "precision.dtype"):
            assert name.rpartition(".")[2] + ":" in text
        assert cfg.run == f"runs/{path.stem}"


def _given(cfg: RunConfig) -> dict[str, Any]:
    """What runs that are compared have in common."""
    train = {name: getattr(cfg.train, name) for name in ("steps", "tokens", "global_batch", "seed")}
    return {
        "data": asdict(cfg.data) | {"cache": None},
        "optimizer": asdict(cfg.optimizer),
        "schedule": asdict(cfg.schedule),
    } | train


@pytest.mark.parametrize("name", list(SETS))
def test_a_folder_compares_at_equal_budgets_with_both_controls(name: str) -> None:
    by_size: dict[str, list[RunConfig]] = {}
    for path in SETS[name]:
        cfg = assert_fits(path, WORLD.get(name, 8))
        preset = str(cfg.model.preset)
        assert path.stem.startswith(f"{preset}-") and cfg.run == f"runs/{name}/{path.stem}"
        depth_apart = "llama-1.4b" if preset == "llama-2.8b" else preset.removesuffix("-x2depth")
        by_size.setdefault(depth_apart, []).append(cfg)
    for cfgs in by_size.values():
        assert all(_given(cfg) == _given(cfgs[0]) for cfg in cfgs), "budgets differ"
        scales = {embedding_scale(c.model, method_of(c)) for c in cfgs if c.ponder.method != "vanilla"}
        controls = [c for c in cfgs if c.ponder.method == "vanilla"]
        assert {1.0, *scales} == {embedding_scale(c.model, method_of(c)) for c in controls}


def test_the_stages_of_upcycling_are_those_of_one_mixture() -> None:
    """What `megaponder upcycle split` makes of the first is what the others train."""
    expert, mixture, routers = (assert_fits(p, 8 if p.stem.endswith("expert") else 64) for p in STAGES)
    made = mixture_config(expert, 8, 8, Path("-")).model
    assert all(replace(c.model, preset=None) == replace(made, preset=None) for c in (mixture, routers))
    assert (expert.train.only, routers.train.only, mixture.train.only) == (["mlp"], ["routers"], [])
    total, unused = model_parameters(made).total, inactive(made)
    assert (round(total / 1e9, 2), round((total - unused) / 1e9, 2)) == (53.25, 13.33)
    assert model_parameters(expert.model).total == 7_615_616_512
    without_routers = total - unused - made.num_layers * 64 * made.hidden_size  # type: ignore[operator]
    assert without_routers / 1e9 == pytest.approx(13.32, abs=0.005)


def test_a_domain_of_30b_is_planned_on_64_to_512_gpus() -> None:
    """GeoGalactica's stages: 29.97 billion parameters, its learning rates, its batch."""
    cpt, sft = (resolve(load_config(path, ["--train.steps", "7325"])) for path in DOMAIN)
    for cfg in (cpt, sft):
        facts = facts_of(method_of(cfg))
        for world in (64, 128, 256, 512):
            check(cfg, facts, world)
            plan = build_plan(cfg, method_of(cfg), facts, world, 0.4, GPUS[DEFAULT_GPU])
            assert max(stage.total for stage in plan.stages) / 2**30 < GPUS[DEFAULT_GPU].memory_gib * 0.9
    assert cpt.model == sft.model and model_parameters(cpt.model).total == 29_972_576_256
    whole = resolve(load_config(DOMAIN[0], []))
    assert whole.train.steps == -(-30_000_000 // 4096) == 7325
    rate = build_schedule(whole.schedule, whole.optimizer, whole.train.steps)
    assert rate.warmup == 100 and [rate(0), rate(100)] == [0.0, 1e-5] and rate(7325) == pytest.approx(1e-7)
    assert rate(50) == pytest.approx(5e-6) and rate(100 + 7225 // 2) == pytest.approx((1e-5 + 1e-7) / 2, rel=1e-3)
    assert sft.data.document_attention and load_config(DOMAIN[1], []).train.epochs == 3


def test_plain_files_state_what_they_are_and_have_a_matched_twin() -> None:
    by_name = {path.stem: path for path in CONFIGS}
    found = 0
    for name, path in by_name.items():
        preset, _, method = name.rpartition("-")
        if method not in ("ponderlm", "ponderlm2") or name.startswith("tiny"):
            continue
        cfg = resolve(load_config(path, []))
        scale = {"ponderlm": "sqrt_h", "ponderlm2": "sqrt_2.5h"}[method]
        twin, plain = (resolve(load_config(by_name[f"{preset}-vanilla{x}"], [])) for x in (f"-{scale}", ""))
        assert embedding_scale(twin.model, method_of(twin)) == embedding_scale(cfg.model, method_of(cfg))
        assert twin.model.init == "trunc_normal" == initialisation(cfg.model, method_of(cfg))[0]
        assert _given(twin) == _given(cfg)
        assert (plain.model.embedding_scale, plain.model.init, plain.model.init_output_scale) == ("none", "normal", 1.0)
        found += 1
    assert found == 16


def trained() -> list[Path]:
    """All files, but for matched twins, which differ from others in their initialisation alone, and those of a
    package that is not here."""
    lacking = () if find_spec("deepspeed") else ("deepspeed",)
    return [path for path in CONFIGS if not any(word in path.stem for word in ("vanilla-sqrt", *lacking))]


def train_all(folder: str, dataset: str) -> dict[str, list[dict[str, Any]]]:
    """In a worker: two steps of every configuration; the rows of its metrics by file.

    Files that differ in sizes, rates and intervals alone are one run once they are scaled down: it is trained once.
    """
    from megaponder.training.job import train

    done: dict[str, Path] = {}
    rows = {}
    for path in trained():
        cfg = scaled(path, Path(folder) / path.stem, dataset)
        kinds = {"run": None, "optimizer": cfg.optimizer.kind, "schedule": cfg.schedule.kind, "checkpoint": None}
        same = json.dumps(asdict(cfg) | kinds | {"train": asdict(cfg.train) | {"eval_every": None}}, default=str)
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
    assert sorted(rows) == sorted(path.stem for path in trained())
    for name, series in rows.items():
        losses = [row["loss"] for row in series if "loss" in row]
        assert len(losses) == STEPS, name
        # untrained: near the uniform loss
        assert all(math.isfinite(x) and abs(x - math.log(VOCAB)) < 1.0 for x in losses), (name, losses)
        assert math.isfinite(series[-1]["validation_loss"]), name
