"""Activations of the first passes in main memory: what moves is what recomputed layers keep, and no number changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed import run_workers
from tests.layouts.cases import LENGTH, SEQUENCES

ROWS = (LENGTH, SEQUENCES, 32)
"""Hidden states of a layer, of all sequences."""


@pytest.mark.parametrize("case", ["ponderlm-pythia", "adaponderlm-llama-gqa"])
def test_what_layers_keep_moves_and_comes_back(case: str) -> None:
    choices = [(case, 0), (case, 1), (case, 3)]
    whole, first, three = run_workers("tests.engine.offload_workers:steps", 1, args={"choices": choices})[0]
    assert whole["moved"] == []
    for found, passes in ((first, 1), (three, 3)):
        assert found["moved"].count(ROWS) == 2 * passes, "the input of each of two layers"
        assert not any(len(shape) == 2 and shape[0] == 32 for shape in found["moved"]), "a weight moved"
        assert sorted(found["back"]) == sorted(found["moved"])
        assert found["loss"] == whole["loss"]
        same(found["gradients"], whole["gradients"])


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Bit for bit."""
    for name, gradient in want.items():
        np.testing.assert_array_equal(got[name], gradient, err_msg=name)
    assert any(np.abs(gradient).max() > 1e-4 for gradient in want.values())
