"""Muon: the formula, torch's own where that can run, and the same numbers in every layout that it allows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megaponder.checkpoint import folder, reader
from megaponder.checkpoint.state import load_saved_config
from megaponder.plan.extras import extras
from megaponder.plan.memory import Job, rank_memory
from megaponder.ponder.facts import facts_of
from megaponder.ponder.settings import method_of
from megaponder.training.muon import Muon, Pieces, owners, update_of
from tests.tolerance import ATOL, RTOL, STEPS_BF16
from tests.training.conftest import Base, run
from tests.training.test_resume import series

UNTIED = {"model__tie_embeddings": False}
MUON = UNTIED | {"optimizer__kind": "muon", "ponder__method": "ponderlm", "ponder__options": {"steps": 1}}
MUON |= {"optimizer__tuned_width": 16}  # half of this model's
BF16 = {"precision__dtype": "bf16"}
LAYOUTS: dict[str, dict[str, object]] = {
    "muon-tp2-sp": {"parallel__tensor": 2, "parallel__sequence": True},
    "muon-pp2": {"parallel__pipeline": 2},
    "muon-dp2-overlap": {"parallel__overlap_grad_reduce": True},
    "muon-dp2-shared-out": {
        "parallel__distributed_optimizer": True,
        "parallel__overlap_grad_reduce": True,
        "parallel__overlap_param_gather": True,
    },
}


class Alone:
    """A group of one."""

    @staticmethod
    def size() -> int:
        return 1


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_in_bf16_it_is_the_one_of_torch() -> None:
    shapes = ((8, 8), (24, 8), (8, 40))
    theirs, ours = ([torch.nn.Parameter(drawn(*s)) for s in shapes] for _ in range(2))
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    muon = Muon([{"params": ours, "weight_decay": 0.1}], 0.02, 0.9, torch.bfloat16, Alone)  # type: ignore[arg-type]
    for step in range(3):
        for pair in zip(theirs, ours, strict=True):
            for p in pair:
                p.grad = drawn(*p.shape, seed=step + 1)
        reference.step()
        muon.step()
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)
        assert (a != drawn(*a.shape)).all()


def polynomial(matrix: Tensor) -> Tensor:
    """0.2 sqrt(max(rows, columns)) O(matrix) in float64, through the singular values."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return 0.2 * max(matrix.shape) ** 0.5 * (u * s) @ v


def test_the_matrices_in_one_parameter_are_orthogonalised_each_by_itself() -> None:
    fused = drawn(2 * (6 + 3 + 3), 16)  # two groups of two query heads, one key and one value head, of size 3
    rows = torch.arange(24).view(2, 12)
    want = torch.empty_like(fused, dtype=torch.float64)
    for own in (rows[:, :6], rows[:, 6:9], rows[:, 9:]):
        want[own.flatten()] = polynomial(fused[own.flatten()])
    torch.testing.assert_close(
        update_of(fused, Pieces(2, (6, 3, 3)), torch.float32).double(), want, rtol=1e-5, atol=1e-5
    )
    assert (polynomial(fused) - want).abs().max() > 0.1


def test_ranks_share_matrices_out_evenly() -> None:
    matrices = [drawn(*shape) for shape in ((8, 8), (24, 8), (8, 40), (16, 16), (8, 8))]
    owner = owners(matrices, 3)
    assert [owner[m] for m in matrices] == [2, 2, 0, 1, 1]  # 320, 256, 192, then 64 to who has least
    assert set(owners(matrices, 1).values()) == {0} and set(owners(matrices, 9).values()) == set(range(5))


@pytest.fixture(scope="module")
def trained(base: Base) -> Base:
    """A run of eight steps in one process, its continuation from step 3 in each layout, and back."""
    jobs = [{"run": str(base.root / "muon")} | MUON, {"run": str(base.root / "muon-bf16")} | MUON | BF16]
    run("run_many", 1, jobs=[job | {"data": base.data} for job in jobs])
    layouts = [base.copy(n, source="muon") | MUON | changes for n, changes in LAYOUTS.items()]
    layouts[-1] |= {"checkpoint__local": str(base.root / "local"), "checkpoint__local_every": 4}
    layouts.append(base.copy("muon-bf16-shared-out", source="muon-bf16") | MUON | BF16 | LAYOUTS["muon-dp2-shared-out"])
    run("run_many", 2, jobs=layouts)
    back = base.copy("muon-back", source="muon-dp2-shared-out", upto=6) | MUON
    loaded = {"run": str(base.root / "muon-loaded"), "checkpoint__load": str(base.root / "muon-bf16")}
    loaded |= {"data": base.data, "train__steps": 1, "schedule__warmup_fraction": 0.0} | UNTIED
    run("run_many", 1, jobs=[back, *(job | MUON | BF16 for job in (base.copy("muon-bf16-same", "muon-bf16"), loaded))])
    return base


@pytest.mark.parametrize("name", [*LAYOUTS, "muon-back"])
def test_every_layout_continues_the_series(trained: Base, name: str) -> None:
    want, got = series(trained.rows("muon")), series(trained.rows(name))
    for key, values in want.items():
        np.testing.assert_allclose(got[key], values, RTOL, ATOL, err_msg=f"{name}: {key}")


def test_master_weights_and_a_resume(trained: Base) -> None:
    assert series(trained.rows("muon-bf16-same")) == series(trained.rows("muon-bf16"))
    losses = [series(trained.rows(name))["loss"] for name in ("muon-bf16", "muon")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=4e-3)
    shared = series(trained.rows("muon-bf16-shared-out"))["loss"]
    np.testing.assert_allclose(shared, losses[0], rtol=STEPS_BF16)
    # a run from its weights goes on from there, masters and average too
    assert trained.rows("muon-loaded")[1]["loss"] < trained.rows("muon-bf16")[1]["loss"] - 0.2
    path = folder.final(trained.root / "muon-loaded" / "checkpoints", 1)
    saved = reader.read(path, reader.tensors(path))
    for name in (n for n in saved if n.startswith(reader.EMA)):
        master = saved[reader.MASTER + name.removeprefix(reader.EMA)]
        assert 0 < (saved[name] - master).abs().max() < 0.05, "an average began elsewhere"
    (found,), _ = run(
        "refusals", 1, jobs=[trained.copy("muon-not", source="muon") | MUON | {"optimizer__kind": "adamw"}]
    )
    assert found[0].startswith("optimizer.kind = 'adamw': checkpoint ") and "was trained with 'muon'; use " in found[0]


def test_only_matrices_of_layers_lack_a_second_moment(trained: Base) -> None:
    path = folder.final(trained.root / "muon" / "checkpoints", 8)
    names = reader.shapes(path)
    second = {n.partition("exp_avg_sq.")[2] for n in names if "exp_avg_sq." in n}
    first = {n.partition("exp_avg.")[2] for n in names if "exp_avg." in n}
    parameters = {n for n in names if not n.startswith(reader.BESIDES)}
    assert first == parameters
    assert parameters - second == {
        f"decoder.layers.{i}.{m}.weight"
        for i in range(2)
        for m in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    cfg = load_saved_config(path)
    method = method_of(cfg)
    planned = rank_memory(Job(cfg, facts_of(method, 1), method.passes(1, 0), 1), 0).optimizer
    assert planned == sum(4 * math.prod(shape) for n, shape in names.items() if n.startswith("optimizer."))
    assert trained.rows("muon")[8]["loss"] < trained.rows("muon")[1]["loss"]


def test_each_rank_holds_its_own_matrices_alone(trained: Base) -> None:
    """What lies in the ranks' local checkpoints, and what `plan` says of it."""
    (root,) = (trained.root / "local").iterdir()
    held = [torch.load(root / f"rank_0000{rank}" / "step_00000004" / "tensors.pt") for rank in (0, 1)]
    counts = [{n: t.numel() for n, t in h["optimizer"].items() if not n.endswith(".param")} for h in held]
    assert abs(sum(counts[0].values()) - sum(counts[1].values())) < sum(counts[0].values()) / 4
    assert not any(torch.equal(a, b) for a in muons(held[0]) for b in muons(held[1]) if a.shape == b.shape)
    cfg = load_saved_config(folder.final(trained.root / "muon-dp2-shared-out" / "checkpoints", 8))
    method = method_of(cfg)
    facts = facts_of(method, 1)
    planned = rank_memory(Job(cfg, facts, method.passes(1, 0), 2), 0)
    averages = sum(t.numel() for h in held for t in h["ema"].values())
    assert 4 * (sum(sum(c.values()) for c in counts) + averages) == 2 * planned.optimizer
    parameters = sum(t.numel() for t in held[0]["model"].values())
    assert extras(cfg, planned, 2, parameters, 2).local_bytes == 4 * parameters + planned.optimizer


def muons(held: dict[str, dict[str, Tensor]]) -> list[Tensor]:
    """First moments of matrices that have no second one."""
    own = held["optimizer"]
    return [t for n, t in own.items() if n.endswith(".exp_avg") and f"{n}_sq" not in own]
