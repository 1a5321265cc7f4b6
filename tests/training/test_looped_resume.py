"""Runs of recurrent depth go on in any layout: uneven stages, parameters of the first stage, drawn depth."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from tests.layouts.cases import WHOLE
from tests.tolerance import ATOL, RTOL
from tests.training.conftest import Base, run

HUGINN: dict[str, Any] = {
    "model__num_layers": 4,
    "ponder__method": "huginn",
    "ponder__options": {"prelude": 1, "coda": 1, "recurrence": 2, "kept": 1, "draw_to": 3},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stages-1-3": {"parallel__pipeline": 2, "parallel__stage_layers": [1, 3], "parallel__recompute": "layer"},
    "dp2-overlap": {"parallel__distributed_optimizer": True, "parallel__overlap_grad_reduce": True},
}
if WHOLE:
    LAYOUTS["stages-3-1"] = {"parallel__pipeline": 2, "parallel__stage_layers": [3, 1]}


def assert_goes_on(base: Base, name: str) -> None:
    want, got = base.rows("huginn"), base.rows(name)
    for key in ("loss", "grad_norm", "validation_loss", "needed_flops"):
        a, b = ([rows[s][key] for s in range(4, 9) if key in rows[s]] for rows in (want, got))
        np.testing.assert_allclose(b, a, RTOL, ATOL, err_msg=f"{name}: {key}")


def test_other_stages_go_on_with_what_one_process_saved(base: Base) -> None:
    first = {"run": str(base.root / "huginn"), "data": base.data} | HUGINN
    run("run_many", 1, jobs=[first])
    costs = [base.rows("huginn")[s]["needed_flops"] for s in range(1, 9)]
    assert len({round(b - a) for a, b in pairwise(costs)}) == 3  # 1, 2 and 3 recurrences
    run("run_many", 2, jobs=[base.copy(n, source="huginn") | HUGINN | changes for n, changes in LAYOUTS.items()])
    run("run_many", 1, jobs=[base.copy(f"{n}-back", source=n, upto=6) | HUGINN for n in ("stages-1-3", "dp2-overlap")])
    for name in (*LAYOUTS, "stages-1-3-back", "dp2-overlap-back"):
        assert_goes_on(base, name)
