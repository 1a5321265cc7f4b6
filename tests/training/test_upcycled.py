"""The stages of upcycling as runs: what is not trained keeps its bits in every layout, and checkpoints know all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaponder.checkpoint import folder, reader
from megaponder.checkpoint.weights import load_weights
from megaponder.config.trained import groups_of
from megaponder.upcycle.merge import merge
from megaponder.upcycle.record import of_checkpoint
from megaponder.upcycle.split import split
from tests.tolerance import ATOL, RTOL
from tests.training.conftest import Base, run

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "bf16-recompute": (1, {"precision__dtype": "bf16", "parallel__recompute": "layer"}),
    "ep2-distopt": (2, {
        "parallel__experts": 2, "parallel__distributed_optimizer": True, "parallel__overlap_grad_reduce": True,
    }),
    "ep2-tp2-sp": (2, {
        "parallel__experts": 2, "parallel__tensor": 2, "parallel__expert_tensor": 1, "parallel__sequence": True,
    }),
    "pp2": (2, {"parallel__pipeline": 2}),
}  # fmt: skip
SHORT = {"train__steps": 2, "train__eval_every": 1, "checkpoint__every": 1, "train__eval_batches": 1}
SHORT |= {"optimizer__ema_decay": 0.0}


def model(cfg: Any) -> dict[str, Any]:
    return {"model__moe": cfg.model.moe, "model__ffn_size": cfg.model.ffn_size}


@pytest.fixture(scope="module")
def mixture(base: Base) -> Path:
    """Two copies of the base whose MLPs were trained, one of them in BF16, as a mixture."""
    job = {"data": base.data, "checkpoint__load": str(base.run), "train__only": ["mlp"]} | SHORT
    bf16 = {"precision__dtype": "bf16", "train__seed": 2}
    run("run_many", 1, jobs=[job | {"run": f"{base.root}/art"}, job | {"run": f"{base.root}/law"} | bf16])
    before = load_weights(base.run)[1]
    for name in ("art", "law"):
        after = load_weights(base.root / name)[1]
        for n, t in before.items():
            assert torch.equal(after[n], t.to(after[n].dtype)) == (groups_of(n) != ("mlp",)), f"{name}: {n}"
    out = base.root / "upcycled"
    split(base.run, {name: base.root / name for name in ("art", "law")}, out, slices=4)
    return out


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return reader.read(path, {n: m for n, m in reader.tensors(path).items() if not n.startswith("random.")})


@pytest.fixture(scope="module")
def runs(base: Base, mixture: Path) -> Path:
    """Where all layouts have trained the mixture's routers: in the folders r-LAYOUT, and more beside them."""
    cfg, _ = load_weights(mixture)
    labels = {"weight": 0.3, "data": {"art": [f"{base.data}/train"], "law": [f"{base.data}/valid"]}}
    blend = {"data__train": [3, f"{base.data}/train", 1, f"{base.data}/valid"], "train__disciplines": labels}
    job = {"data": base.data, "checkpoint__load": str(mixture), "train__only": ["routers"]} | SHORT | model(cfg) | blend
    for world in (1, 2):
        jobs = [job | {"run": f"{base.root}/r-{n}"} | c for n, (w, c) in LAYOUTS.items() if w == world]
        if world == 1:  # then everything
            last = {"run": f"{base.root}/whole-mixture", "checkpoint__load": f"{base.root}/r-one", "train__only": []}
            jobs.insert(1, job | last)
            jobs.append(job | {"run": f"{base.root}/r-per-pass", "model__moe": cfg.model.moe | {"routers": "per_pass"}})
        _, output = run("run_many", world, jobs=jobs)
        asked = sum(w == world for w, _ in LAYOUTS.values()) + (world == 1)
        assert output.count("Only routers are trained (train.only).") == asked
    return base.root


def test_routers_alone_change_and_layouts_change_nothing(base: Base, mixture: Path, runs: Path) -> None:
    cfg, _ = load_weights(mixture)
    start = tensors(folder.final(mixture / "checkpoints", 0))
    rows = {n: base.rows(f"r-{n}") for n in LAYOUTS}
    for name in LAYOUTS:
        end = tensors(folder.final(base.root / f"r-{name}" / "checkpoints", 2))
        assert {n for n in end if n.startswith("optimizer.") and ".router." not in n} == set()
        for n, t in start.items():
            kept = torch.equal(end[n], t.to(end[n].dtype))
            master = end.get(f"optimizer.state.param.{n}", end[n])  # a step can be too small for BF16
            assert kept if ".router." not in n else not torch.equal(master, t), f"{name}: {n}"
        if name != "bf16-recompute":
            for key in ("loss", "grad_norm", "validation_loss", "moe_balance", "moe_discipline"):
                got, want = ([rows[n][step][key] for step in (1, 2)] for n in (name, "one"))
                np.testing.assert_allclose(got, want, RTOL, ATOL, err_msg=f"{name}: {key}")
    per_pass = base.rows("r-per-pass")  # routers of passes start as the split's, and alone change, too
    assert per_pass[1]["loss"] == rows["one"][1]["loss"] and per_pass[2]["loss"] != rows["one"][2]["loss"]
    merge(base.root / "r-per-pass", base.root / "merged")
    merged, dense = load_weights(base.root / "merged")[1], load_weights(base.run)[1]
    assert merged.keys() == dense.keys() and all(torch.equal(merged[n], t.float()) for n, t in dense.items())

    record = of_checkpoint(folder.final(mixture / "checkpoints", 0))
    later = of_checkpoint(folder.final(base.root / "whole-mixture" / "checkpoints", 2))
    assert record is not None and later == record

    trained = load_weights(base.root / "whole-mixture")[1]
    first = load_weights(mixture)[1]
    real = -(-record.neurons // record.slices)
    assert real < cfg.model.ffn_size == 32
    for n, t in trained.items():
        assert not torch.equal(t, first[n]), n
        if ".local_experts." in n:
            filling = t.view(2, 32, -1)[:, real:] if "fc1" in n else t[:, real:]
            assert not filling.any() and t.any(), f"{n}: neurons that fill a slice were trained"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another set goes on": (
        {"run": "r-one", "train__steps": 3, "train__only": ["routers", "experts"]},
        "train.only = ['routers', 'experts']: checkpoint",
    ),
    "other names": (
        {"train__disciplines": {"data": {"law": [], "art": []}}},
        "the experts were made of art, law, in this order; name all of them so",
    ),
    "no such dataset": (
        {"train__disciplines": {"data": {"art": ["elsewhere"], "law": []}}},
        "train.disciplines.data.art = 'elsewhere': data.train does not have this dataset",
    ),
}


def test_what_does_not_fit_is_one_sentence(base: Base, mixture: Path, runs: Path) -> None:
    cfg, _ = load_weights(mixture)
    job = {"data": base.data, "checkpoint__load": str(mixture), "train__only": ["routers"]} | SHORT | model(cfg)
    jobs = [job | {"run": "x"} | c for c, _ in REFUSED.values()]
    jobs = [j | {"run": str(runs / j["run"])} for j in jobs]
    (found,), _ = run("refusals", 1, jobs=jobs)
    for sentence, (_, said) in zip(found, REFUSED.values(), strict=True):
        assert said in sentence
