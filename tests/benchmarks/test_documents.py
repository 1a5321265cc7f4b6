"""What the benchmark of documents tells: the two models of a seed are compared, a model without its pair is not."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.documents import gains, report


def model(seed: int, trained: str, joined: float, apart: float) -> dict[str, Any]:
    read = {"joined": {"loss": joined, "kinds": {"law": joined}}, "apart": {"loss": apart, "kinds": {"law": apart - 1}}}
    told = {"kind": "loop", "seed": seed, "trained": trained, "command": "C", "origin": "O", "document_tokens": 9.0}
    return told | read | {"curve": [{"tokens": 4096}], "training_seconds": 1.0}


def test_pairs_of_a_seed_are_compared() -> None:
    found = [model(1, "joined", 5.0, 5.5), model(1, "apart", 4.9, 4.8), model(2, "joined", 5.1, 5.6)]
    ((all_kinds, by_kind),) = gains(found)["loop"]
    assert all_kinds == pytest.approx(0.2) and by_kind == pytest.approx({"law": 1.2})
    assert "| loop | 1 | +0.2000 | +1.2000 |" in report(found, "tiny", 64)
    assert "± 0.1000" in report([*found, model(2, "apart", 5.2, 5.1)], "tiny", 64)
    assert "standard error" not in report(found[2:], "tiny", 64)
