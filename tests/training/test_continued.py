"""Continued pretraining: weights from elsewhere, a method with parameters of its own, and those trained first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from megaponder.checkpoint import folder, reader
from megaponder.export.from_hf import import_hf
from megaponder.export.to_hf import export
from megaponder.ponder.base import PARAMETER_PREFIX
from tests.export import hf_models
from tests.tolerance import ATOL, PARITY, RTOL, difference
from tests.training.conftest import Base, run

OWN = {
    "adaponderlm": [f"gates.{i}.{j}.{part}" for i in range(2) for j in (0, 2) for part in ("bias", "weight")],
    "ponderlm3": ["router.bias", "router.weight"],
    "adaptive_cot": ["router.bias", "router.weight"],
}
COUNT = {"adaponderlm": "steps", "ponderlm3": "latents", "adaptive_cot": "steps"}
HF = {
    "model__family": "pythia", "model__num_layers": 2, "model__num_kv_heads": 4, "model__ffn_size": 44,
    "model__vocab_size": 83, "model__vocab_multiple": 128, "model__rotary_fraction": 0.25,
    "model__parallel_residual": True, "model__norm_eps": 1e-5, "model__tie_embeddings": False,
    "model__max_positions": 40,
}  # fmt: skip


def tensors(run: Path, step: int) -> dict[str, np.ndarray]:
    """Everything in a checkpoint but the random states."""
    path = folder.final(run / "checkpoints", step)
    names = {n: m for n, m in reader.tensors(path).items() if not n.startswith("random.")}
    return {n: t.float().numpy() for n, t in reader.read(path, names).items()}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder made from a random GPT-NeoX folder, and datasets beside it whose ids it knows."""
    from tests.training import datasets

    root = tmp_path_factory.mktemp("continued")
    hf_models.write("neox", root / "hf")
    import_hf(root / "hf", root / "imported")
    datasets.write(root / "train", tokens=400, seed=1, vocabulary=83)
    datasets.write(root / "valid", tokens=200, seed=2, vocabulary=83)
    return root


def job(root: Path, name: str, method: str, **changes: Any) -> dict[str, Any]:
    """Two steps of a method from the imported weights; the first leaves a checkpoint."""
    options = {COUNT[method]: 2, "target": 0.0} if method in COUNT else {}
    ponder = {"ponder__method": method, "ponder__options": options}
    budget = {"train__steps": 1, "checkpoint__every": 1, "train__eval_batches": 0}
    start = {"checkpoint__load": str(root / "imported")}
    return {"run": str(root / name), "data": str(root)} | HF | ponder | budget | start | changes


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10, "beta_fast": 4.0, "beta_slow": 0.5}
LONGER: dict[str, Any] = {
    "model__rotary_base": 5e4, "model__rotary_scaling": YARN, "model__max_positions": 64, "optimizer__lr": 1e-12,
    "checkpoint__load_changes": ["model.rotary_base", "model.rotary_scaling"],
}  # fmt: skip
"""Changes for longer texts, and a step that moves no weight."""
COMPRESSED: dict[str, Any] = {
    "model__freqkv": {"capacity": 8, "sink": 2}, "optimizer__lr": 1e-12, "checkpoint__load_changes": ["model.freqkv"],
}  # fmt: skip


def test_imported_weights_start_methods_with_parameters_of_their_own(imported: Path):
    jobs = [job(imported, name, name) for name in ("vanilla", *OWN)]
    jobs.append(job(imported, "longer", "vanilla", **LONGER))
    jobs.append(job(imported, "compressed", "vanilla", **COMPRESSED))
    _, output = run("run_many", 1, jobs=jobs)
    for name in LONGER["checkpoint__load_changes"] + COMPRESSED["checkpoint__load_changes"]:
        assert f"Warning: {name} was " in output
    short = "YaRN with factor 4 stretches 10 positions to 40, fewer than model.max_positions = 64; factor 6.4 reaches"
    assert output.count(short) == 1
    assert output.count("model.freqkv: where a sample holds several documents") == 1
    run("run_many", 2, jobs=[job(imported, f"{n}-pp2", n, parallel__pipeline=2) for n in OWN])
    for name, own in OWN.items():
        names = ", ".join(f"{PARAMETER_PREFIX}modules.{n}" for n in own)
        assert f"; newly initialised: {names}.\n" in output
        np.testing.assert_allclose(  # fresh values do not depend on the layout
            tensors(imported / f"{name}-pp2", 1)[f"{PARAMETER_PREFIX}modules.{own[-1]}"],
            tensors(imported / name, 1)[f"{PARAMETER_PREFIX}modules.{own[-1]}"], RTOL, ATOL,
        )  # fmt: skip
    assert output.count("Starting from the weights of") == len(jobs)

    export(imported / "longer", imported / "longer-hf")
    longer, plain = (AutoModelForCausalLM.from_pretrained(imported / name) for name in ("longer-hf", "hf"))
    names = hf_models.rope(5e4, partial_rotary_factor=0.25, **YARN)
    changed = GPTNeoXForCausalLM(GPTNeoXConfig(**hf_models.NEOX | {"max_position_embeddings": 64}, **names)).eval()
    changed.load_state_dict(plain.state_dict())
    ids = torch.randint(83, (2, 64), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        want, got, before = (model(ids).logits for model in (changed, longer, plain))
    assert difference(got, want) < PARITY
    assert difference(before, want) > 0.01

    export(imported / "compressed", imported / "compressed-hf")  # FreqKV changes texts beyond its capacity alone
    net = AutoModelForCausalLM.from_pretrained(imported / "compressed-hf", trust_remote_code=True)
    with torch.no_grad():
        short = net(ids).logits
    assert difference(short[:, :8], before[:, :8]) < PARITY
    assert difference(short[:, 8:], before[:, 8:]) > 0.01


def test_an_import_has_names_that_both_implementations_read(imported: Path):
    """Norms are a part of the projections, as in Transformer Engine; PyTorch's layers map their names to these."""
    path = folder.final(imported / "imported" / "checkpoints", 0)
    norms = {n for n in reader.tensors(path) if n.startswith("decoder.layers.0.") and n.endswith("norm_weight")}
    assert norms == {
        f"decoder.layers.0.{part}.layer_norm_weight" for part in ("self_attention.linear_qkv", "mlp.linear_fc1")
    }


def test_an_imported_run_folder_points_to_load(imported: Path):
    here = {"run": str(imported / "imported"), "checkpoint__load": None}
    jobs = [job(imported, "x", method) | here for method in ("vanilla", "ponderlm3")]
    (found,), _ = run("refusals", 1, jobs=jobs)
    for sentence in found:
        assert "weights without optimizer state" in sentence
        assert f"start a run in another folder from it, with --checkpoint.load {imported / 'imported'}." in sentence
    assert not (imported / "imported" / "lock.json").exists()


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "bf16": (1, {"precision__dtype": "bf16"}),
    "pp2": (2, {"parallel__pipeline": 2}),
    "distopt-overlap": (
        2,
        {
            "parallel__distributed_optimizer": True,
            "parallel__overlap_grad_reduce": True,
            "parallel__overlap_param_gather": True,
        },
    ),
}


def test_the_methods_parameters_are_trained_first(base: Base):
    only = {
        "data": base.data, "ponder__method": "adaponderlm", "ponder__options": {"steps": 2, "target": 0.0},
        "optimizer__lr": 1e-2, "train__steps": 3, "train__method_only_steps": 2, "train__method_lr": 3e-2,
        "train__eval_batches": 0, "checkpoint__every": 1,
        "checkpoint__load": str(base.run), "model__tie_embeddings": True,
    }  # fmt: skip
    for world in (1, 2):
        jobs = [{"run": str(base.root / f"own-{n}")} | only | c for n, (w, c) in LAYOUTS.items() if w == world]
        _, output = run("run_many", world, jobs=jobs)
        assert output.count("Up to step 2 only the parameters of adaponderlm itself are trained") == len(jobs)
    before = tensors(base.run, 8)
    for name in LAYOUTS:
        series = {step: tensors(base.root / f"own-{name}", step) for step in (1, 2, 3)}
        backbone = [n for n in series[1] if not n.startswith((PARAMETER_PREFIX, "optimizer."))]
        assert len(backbone) > 10
        for n in backbone:
            start = before[n] if name != "bf16" else series[1][n]
            assert (series[1][n] == start).all() and (series[2][n] == start).all(), f"{name}: {n}"
            for moment in ("exp_avg", "exp_avg_sq"):
                assert not series[2][f"optimizer.state.{moment}.{n}"].any(), f"{name}: {n} has a {moment}"
            # in BF16 a step can be too small for the parameter, though not for its master
            kept = f"optimizer.state.param.{n}" if name == "bf16" else n
            assert (series[3][kept] != series[2][kept]).any(), f"{name}: {n} rests for ever"
        last = f"{PARAMETER_PREFIX}modules.gates.1.2.bias"
        assert (series[1][last] != series[2][last]).all(), f"{name}: the gates rest"
        master = f"optimizer.state.param.{last}" if name == "bf16" else last
        # from 2.0; Adam's first step is as long as the learning rate
        assert abs(series[1][master] - 2.0) == pytest.approx(3e-2, rel=1e-3), f"{name}: the rate is not train.method_lr"
        if name != "bf16":
            losses = [[row["loss"] for row in base.rows(f"own-{n}").values()] for n in ("one", name)]
            np.testing.assert_allclose(losses[1], losses[0], RTOL, ATOL, err_msg=name)

    # whether a step is one of the first is read from its number, so a kill among them changes nothing
    run("run_many", 1, jobs=[only | base.copy("own-again", source="own-one", upto=1)])
    want, again = (tensors(base.root / name, 3) for name in ("own-one", "own-again"))
    assert all((again[n] == tensor).all() for n, tensor in want.items())
