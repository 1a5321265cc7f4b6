"""Mixtures of experts go on in any layout: experts shared by ranks, split over them, and biases that were moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megaponder.checkpoint.weights import load_weights
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
