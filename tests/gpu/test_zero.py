"""DeepSpeed beside megatron-core on two GPUs: losses of the first steps, in FP32 and on Transformer Engine in BF16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_workers
from tests.engine.zero_workers import BF16, Choice
from tests.tolerance import RTOL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CHOICES: list[Choice] = [
    (1, "none", "none"), (2, "none", "none"), (2, "optimizer", "none"), (3, "none", "none"), (3, "weights", "layer"),
]  # fmt: skip
CASES = dict.fromkeys(("loop-drawn-gqa", "ponderlm-pythia", f"ponderlm-pythia{BF16}"), CHOICES)


@pytest.fixture(scope="module")
def found() -> Any:
    pytest.importorskip("deepspeed")
    return run_workers("tests.engine.zero_workers:both", 2, args={"cases": CASES, "count": 5})[0]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_losses_are_near(found: Any, case: str, choice: Choice) -> None:
    want, got = (np.array(found[case, one]["rows"])[:, 0] for one in (None, choice))
    print(case, choice, np.abs(got / want - 1).max(), found[case, choice]["held"])
    np.testing.assert_allclose(got, want, 1e-2 if BF16 in case else RTOL)
