"""Mixtures of experts go on in any layout: experts shared by ranks, split over them, and biases that were moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megaponder.checkpoint import folder
from megaponder.checkpoint.weights import load_weights
from megaponder.config.load import from_mapping, to_mapping
from megaponder.errors import ConfigError
from megaponder.plan.parameters import model_parameters
from megaponder.training.setup import refuse_other_model
from tests.layouts.cases import WHOLE
from tests.tolerance import ATOL, RTOL
from tests.training.conftest import Base, run

MOE: dict[str, Any] = {
    "model__moe": {
        "experts": 4, "top_k": 2, "shared_ffn": 16, "score": "sigmoid", "aux_weight": 0.05, "bias_rate": 0.01,
    },
    "model__ffn_size": 48,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2-distopt-overlap": {
        "parallel__experts": 2, "parallel__distributed_optimizer": True, "parallel__overlap_grad_reduce": True,
    },
    "ep2-tp2-sp": {
        "parallel__experts": 2, "parallel__tensor": 2, "parallel__expert_tensor": 1, "parallel__sequence": True,
    },
}  # fmt: skip
if WHOLE:
    LAYOUTS |= {"ep2": {"parallel__experts": 2}, "tp2": {"parallel__tensor": 2}}
PER_PASS: dict[str, Any] = MOE | {"model__moe": MOE["model__moe"] | {"routers": "per_pass"}}
SERIES = ("loss", "grad_norm", "validation_loss", "moe_balance", "moe_load_max", "moe_load_min", "moe_entropy")


def test_ranks_that_share_experts_go_on_with_what_one_process_saved(base: Base) -> None:
    first = {"run": str(base.root / "moe"), "data": base.data} | MOE
    run("run_many", 1, jobs=[first])
    run("run_many", 2, jobs=[base.copy(n, source="moe") | MOE | changes for n, changes in LAYOUTS.items()])
    back = ("ep2-distopt-overlap", "ep2-tp2-sp") if WHOLE else ("ep2-tp2-sp",)
    run("run_many", 1, jobs=[base.copy(f"{n}-back", source=n, upto=6) | MOE for n in back])
    want = base.rows("moe")
    assert want[8]["moe_load_max"] > 1 > want[8]["moe_load_min"]
    for name in (*LAYOUTS, *(f"{n}-back" for n in back)):
        got = base.rows(name)
        for key in SERIES:
            a, b = ([rows[s][key] for s in range(4, 9) if key in rows[s]] for rows in (want, got))
            np.testing.assert_allclose(b, a, RTOL, ATOL, err_msg=f"{name}: {key}")
    weights = {n: load_weights(base.root / n / "checkpoints" / "step_00000008")[1] for n in ("moe", *LAYOUTS)}
    names = [n for n in weights["moe"] if "local_experts.3.linear_fc1" in n or n.endswith("expert_bias")]
    assert len(names) == 4
    for name in names:
        assert weights["moe"][name].abs().max() > 0
        for other in LAYOUTS:
            torch.testing.assert_close(weights[other][name], weights["moe"][name], rtol=RTOL, atol=RTOL)


def test_routers_of_passes_start_as_the_one_and_alone_go_on(base: Base) -> None:
    """A router for each pass from a checkpoint with one: the same model, which other layouts go on with."""
    one = {"run": str(base.root / "moe-one"), "data": base.data, "train__steps": 4} | MOE
    start = {"checkpoint__load": f"{base.root}/moe-one", "train__only": ["routers"]}
    names = ("shared", "per-pass")
    jobs = [one, *({**one, **start, **more, "run": f"{base.root}/moe-{n}", "train__steps": 8}
            for n, more in zip(names, (MOE, PER_PASS), strict=True))]  # fmt: skip
    _, output = run("run_many", 1, jobs=jobs)
    assert "Each of the 2 routers in a layer starts as the checkpoint's one." in output
    shared, per_pass = (base.rows(f"moe-{n}") for n in names)
    assert per_pass[1]["loss"] == shared[1]["loss"] and per_pass[1]["moe_load_max"] == shared[1]["moe_load_max"]
    assert per_pass[8]["loss"] != pytest.approx(shared[8]["loss"], rel=RTOL)
    assert per_pass[8]["moe_load_max_pass0"] != per_pass[8]["moe_load_max_pass1"]
    assert "moe_load_max_pass0" not in shared[8]

    steps = [base.root / "moe-one" / "checkpoints", base.root / "moe-per-pass" / "checkpoints"]
    (_, before), (cfg, after) = (load_weights(folder.final(path, 4 * (i + 1))) for i, path in enumerate(steps))
    assert cfg.model.moe is not None and cfg.model.moe["routers"] == 2
    held = sum(tensor.numel() for name, tensor in after.items() if not name.endswith("expert_bias"))
    assert held == model_parameters(cfg.model, padded=True).total
    for name, tensor in after.items():
        if ".router." not in name:
            assert torch.equal(tensor, before[name]), name
            continue
        first, second = tensor.chunk(2)
        assert not torch.equal(first, second) and not torch.equal(first, before[name]), name

    only = PER_PASS | {"train__only": ["routers"]}
    changes = LAYOUTS["ep2-tp2-sp"], {"parallel__pipeline": 2}
    run("run_many", 2, jobs=[base.copy(f"moe-p{i}", source="moe-per-pass") | only | c for i, c in enumerate(changes)])
    for i in range(2):
        got = base.rows(f"moe-p{i}")
        for key in (*SERIES, "moe_load_max_pass1", "moe_load_min_pass0"):
            a, b = ([rows[s][key] for s in range(4, 9) if key in rows[s]] for rows in (per_pass, got))
            np.testing.assert_allclose(b, a, RTOL, ATOL, err_msg=f"{i}: {key}")

    found = to_mapping(cfg)
    balance = cfg.model.moe | {"aux_weight": 0.5, "bias_rate": 2 * cfg.model.moe["bias_rate"]}
    for moe, words in ((balance, ["aux_weight", "bias_rate"]), (cfg.model.moe | {"scale": 1.0}, [])):
        found["model"]["moe"] = moe
        asked, path = from_mapping(found), folder.final(steps[1], 8)
        warned = refuse_other_model(asked, path)
        assert [w.split(" was ")[0] for w in warned] == [f"Warning: model.moe.{name}" for name in words]
        assert refuse_other_model(asked, path, weights_only=True) == []
    for change in ({"bias_rate": 0.0}, {"top_k": 1}):
        found["model"]["moe"] = balance | change
        for weights_only in (False, True):
            with pytest.raises(ConfigError, match=r"model\.moe = .* was trained with"):
                refuse_other_model(from_mapping(found), path, weights_only)
    for routers, fix in (("shared", "has 2 routers in a layer, which choose differently"), (3, "")):
        found["model"]["moe"] = cfg.model.moe | {"routers": routers}
        asked, path = from_mapping(found), folder.final(steps[1], 8)
        with pytest.raises(ConfigError, match="was trained with"):
            refuse_other_model(asked, path)
        if fix:
            with pytest.raises(ConfigError, match=f"model.moe.routers = 'shared'.*{fix}.*use 2"):
                refuse_other_model(asked, path, weights_only=True)
        else:
            (sentence,) = refuse_other_model(asked, path, weights_only=True)
            assert sentence == "Of the 3 routers in a layer, those after 2 start as the last of the checkpoint's."
