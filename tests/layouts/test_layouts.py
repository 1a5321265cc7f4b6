"""Loss, auxiliary loss, statistics and every gradient are the same in every layout (design, section 5.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed import run_workers
from tests.layouts.cases import CASES, cases_of, is_gated
from tests.layouts.layouts import ESLM_OF_MICRO, LAYOUTS
from tests.layouts.workers import assemble
from tests.tolerance import ATOL, RTOL

REFERENCE, OF_MICRO, WITH_DOCUMENTS = "one", "one-batch1", "one-documents"


class Results:
    """layout -> case -> one result a rank; one launch for each world size, when first asked for."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def __getitem__(self, layout: str) -> dict[str, list[dict[str, Any]]]:
        if layout not in self._found:
            names = [n for n, other in LAYOUTS.items() if other.world == LAYOUTS[layout].world]
            ranks = run_workers(
                "tests.layouts.workers:run_layouts", LAYOUTS[layout].world, args={"layouts": names}, timeout=1800
            )
            for name in names:
                self._found[name] = {case: [rank[name][case] for rank in ranks] for case in cases_of(LAYOUTS[name])}
        return self._found[layout]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


def _worst(ours: np.ndarray, reference: np.ndarray) -> float:
    return float(np.abs(ours - reference).max() / max(np.abs(reference).max(), ATOL))


def reference_of(case: str, documents: bool = False) -> str:
    """The layout that a case's other layouts are compared with."""
    return WITH_DOCUMENTS if documents else OF_MICRO if case == ESLM_OF_MICRO else REFERENCE


MATRIX = [
    (case, name)
    for name, layout in LAYOUTS.items()
    for case in cases_of(layout)
    if name != reference_of(case, layout.documents)
]


@pytest.mark.parametrize(("case", "layout"), MATRIX)
def test_layout_changes_nothing(results: Any, case: str, layout: str) -> None:
    gated = is_gated(case)
    reference = results[reference_of(case, LAYOUTS[layout].documents)][case][0]
    expected = assemble([reference], gated)
    ranks = results[layout][case]
    for rank in ranks:
        for key in ("loss", "aux", "z", *(["eval"] if rank["eval"] is not None else [])):
            assert rank[key] == pytest.approx(reference[key], rel=RTOL, abs=ATOL), key
        assert rank["stats"] == pytest.approx(reference["stats"], rel=RTOL, abs=ATOL)
        assert rank["selected"] == pytest.approx(reference["selected"], rel=RTOL, abs=ATOL)
        if rank["eval"] is not None:
            assert rank["eval_stats"] == pytest.approx(reference["eval_stats"], rel=RTOL, abs=ATOL)
        if rank["settled"] is not None:
            assert rank["settled"] == next(r for r in ranks if r["settled"] is not None)["settled"], "ranks differ"
            assert rank["settled"] == pytest.approx(reference["settled"], rel=RTOL, abs=ATOL)
        if rank["by_token"] is not None:
            np.testing.assert_allclose(rank["by_token"], reference["by_token"], rtol=RTOL)
    replicas, of_experts = (1 + max(r[key][0] for r in ranks) for key in ("place", "place_of_experts"))
    assert replicas == LAYOUTS[layout].data * LAYOUTS[layout].context
    for replica in range(max(replicas, of_experts)):
        grads = assemble(ranks, gated, replica)
        whole = {k for k, _ in expected if replica < (of_experts if ".experts." in k else replicas)}
        assert {k for k, _ in grads} == whole
        for key, value in grads.items():
            assert _worst(value, expected[(key[0], "own")]) < RTOL, key


def test_evaluation_counts_every_token_and_pass(results: Any) -> None:
    """Depths by vocabulary entry add up to the mean depth; a loop's last but one pass has a loss of its own."""
    halting = results[REFERENCE]["adaponderlm-pythia-deep"][0]
    depths, counts = halting["by_token"].sum(1)
    assert depths / counts == pytest.approx(halting["eval_stats"]["depth"], rel=RTOL) and counts > 1
    loop = results[REFERENCE]["loop-llama-gqa"][0]
    losses = [loop["eval_stats"]["loss_pass0"], loop["eval_stats"]["loss_pass1"], loop["eval"]]
    assert len({round(x, 5) for x in losses}) == 3


def test_every_gradient_is_alive(results: Any) -> None:
    """A gradient of zero would make the comparison above empty, one near zero would compare sums that cancel."""
    for case in CASES:
        for key, value in assemble(results[reference_of(case)][case], is_gated(case)).items():
            assert np.abs(value).max() > 1e-3, (case, key)


def test_statistics_and_auxiliary_loss_are_alive(results: Any) -> None:
    sink = results[REFERENCE]["everything-llama"][0]
    assert sink["aux"] > 0.01 and 0.05 < sink["stats"]["active"] < 0.95
    for case in ("eslm-global", "eslm-entropy-losses", "eslm-micro-skip"):
        found = results[reference_of(case)][case][0]
        assert 0.5 < found["selected"]["selected_share"] < 0.85, case
