"""Halted tokens gathered away and halted tokens masked give the same numbers (design, section 5.4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.distributed import run_workers
from tests.layouts.cases import CASES, WHOLE
from tests.layouts.samples import REPRESENTATIVES
from tests.layouts.workers import run_layout
from tests.tolerance import ATOL, RTOL

GATHERED = [name for name, case in CASES.items() if case.skip]
SHAPES = ["one-batch1", "one-recompute-some"]
"""Sequences by themselves, and two of different depth, of which one is padded."""
PAIRS = [
    (layout, name) for layout in SHAPES for name in GATHERED if WHOLE or layout != SHAPES[0] or name in REPRESENTATIVES
]


def both_ways() -> dict[str, Any]:
    """In a worker: (layout, case) -> results gathered, results masked, and how many passes had fewer rows."""
    from megaponder.engine.cuda_on_cpu import install

    install()
    from megaponder.engine.model import PonderStage

    found, gathered = {}, PonderStage.gathered
    fewer: list[int] = []

    def counted(stage: PonderStage, active: Any) -> Any:
        rows = gathered(stage, active)
        fewer.extend([rows.places] if rows is not None else [])
        return rows

    PonderStage.gathered = counted  # type: ignore[method-assign]
    for layout, name in PAIRS:
        CASES[f"{name}-masked"] = replace(CASES[name], skip=False)
        fewer.clear()
        one = run_layout(layout, [name])[name]
        count = len(fewer)
        found[layout, name] = one, run_layout(layout, [f"{name}-masked"])[f"{name}-masked"], count
        assert len(fewer) == count, "the masked run gathers"
    return found


@pytest.fixture(scope="module")
def both() -> Any:
    return run_workers("tests.layouts.test_gathered:both_ways", 1)[0]


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_gathered_is_masked(both: Any, layout: str, name: str) -> None:
    gathered, masked, fewer = both[layout, name]
    assert fewer > 1, "nothing was gathered"
    for key in ("loss", "aux", *(["eval"] if masked["eval"] is not None else [])):
        assert gathered[key] == pytest.approx(masked[key], rel=RTOL, abs=ATOL), key
    assert gathered["stats"] == pytest.approx(masked["stats"], rel=RTOL, abs=ATOL)
    assert gathered["grads"].keys() == masked["grads"].keys()
    for key, (grad, _) in masked["grads"].items():
        assert np.abs(gathered["grads"][key][0] - grad).max() < RTOL * max(np.abs(grad).max(), ATOL), key
