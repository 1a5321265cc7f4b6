"""Learning rates over width and passes: states and logits change as much in wide models as in narrow ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_workers
from tests.engine.transfer_workers import TUNED

WIDER = 8
WIDTHS = [TUNED, WIDER * TUNED]
VANILLA: dict[str, Any] = {"method": "vanilla", "options": {}}
PONDERLM: dict[str, Any] = {"method": "ponderlm", "options": {"steps": 1}}
CASES: dict[str, dict[str, Any]] = {
    "vanilla": VANILLA | {"tuned_width": TUNED},
    "vanilla without": VANILLA,
    "ponderlm": PONDERLM | {"tuned_width": TUNED},
    "muon": VANILLA | {"tuned_width": TUNED, "kind": "muon"},
    "muon without": VANILLA | {"kind": "muon"},
    "passes": {"method": "loop", "options": {"extra_passes": 3}, "tuned_width": TUNED, "tuned_passes": 1},
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    args = {"cases": CASES, "widths": WIDTHS, "lr": 3e-3, "steps": 3}
    return run_workers("tests.engine.transfer_workers:all_of", 1, args=args)[0]


def growth(rows: list[dict[str, Any]], name: str) -> float:
    """From the narrowest to the widest."""
    return rows[-1]["size"][name] / rows[0]["size"][name]


@pytest.mark.parametrize("name", ["vanilla", "ponderlm", "muon", "passes"])
def test_wide_models_change_as_much_as_narrow_ones(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    rows = found[name]
    for what in ("states at the start", "change of states"):
        assert 0.8 < growth(rows, what) < 1.25, f"{what}: {growth(rows, what)}"
    # those of a narrow model are larger at the start, and so is the part of their change that the states make
    assert growth(rows, "logits at the start") == pytest.approx(WIDER**-0.5, rel=0.1)
    assert 0.5 < growth(rows, "change of logits") < 1.25


@pytest.mark.parametrize("name", ["vanilla", "muon"])
def test_without_the_option_they_change_more(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    rows = found[f"{name} without"]
    assert growth(rows, "change of states") > WIDER**0.75 and growth(rows, "change of logits") > WIDER**0.5
    assert rows[0] == found[name][0], "at the width at which the rate was tuned nothing is scaled"


def test_rates_and_initial_weights(found: dict[str, list[dict[str, Any]]]) -> None:
    layers, table, head = "decoder.layers.0.mlp.linear_fc2", "embedding.word_embeddings", "output_layer"
    want: dict[str, tuple[float, float, float]] = {  # of the layers, the table and the head
        "vanilla": (1 / WIDER, 1, 1 / WIDER),
        "ponderlm": (1 / WIDER, WIDER**-0.5, 1 / WIDER),
        "muon": (WIDER**-0.5, 1, 1 / WIDER),
        "passes": (0.5 / WIDER, WIDER**-0.5, 1 / WIDER),  # four of them
    }
    for name, of in want.items():
        narrow, wide = found[name]
        rates = {n.removesuffix(".weight"): rate for n, rate in wide["rates"].items()}
        assert (rates[layers], rates[table], rates[head]) == pytest.approx(of), name
        assert rates["final_norm"] == rates["decoder.layers.0.pre_mlp_layernorm"] == 1
        # rate times decay stays what it was, and norms are not decayed
        assert {round(decay, 6) for decay in wide["decays"].values()} == {0.0, 1.0}
        drawn = [wide["std"][f"{part}.weight"] / narrow["std"][f"{part}.weight"] for part in (layers, table, head)]
        assert drawn == pytest.approx((WIDER**-0.5, of[1], 1 / WIDER), rel=0.05), name
