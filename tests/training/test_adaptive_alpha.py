"""alpha follows the selected tokens' loss, in every layout and over restarts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megaponder.checkpoint.state import TrainState
from megaponder.config.eslm import Eslm
from megaponder.training.adaptive_alpha import alpha_of, moved
from tests.tolerance import ATOL, RTOL
from tests.training.conftest import Base, run

OPTIONS: dict[str, Any] = {"by": "loss", "alpha": 0.3, "scope": "global", "warmup": 2, "adapt": 2.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "eslm-dp2": {"parallel__distributed_optimizer": True, "train__micro_batch": 2},
    "eslm-pp2": {"parallel__pipeline": 2},
}


def test_it_follows_the_ratio_of_moving_means() -> None:
    """In closed form: steps multiply up to (first mean / last mean)^adapt; and it stays in its range."""
    options, kept = Eslm("loss", alpha=0.1, adapt=0.5, alpha_range=(0.05, 0.15)), []
    means = [4.0]
    for loss in (4.0, 3.0, 3.5, 2.0, 2.5, 6.0):
        kept = list(moved(options, kept, loss))
        means.append(means[-1] + 0.1 * (loss - means[-1]))
        assert kept == pytest.approx([0.1 * (4.0 / means[-1]) ** 0.5, means[-1]])
    assert moved(options, [0.15, 4.0], 1.0)[0] == 0.15 and moved(options, [0.05, 1.0], 9.0)[0] == 0.05


def test_warm_up_and_a_constant_alpha() -> None:
    options, state = Eslm("loss", warmup=3, adapt=1.0), TrainState(step=2, selection=[0.4, 1.0])
    assert [alpha_of(options, replace(state, step=s)) for s in (2, 3)] == [0.0, 0.4]
    assert alpha_of(replace(options, adapt=0.0), replace(state, step=3)) == 0.1


def test_runs_go_on_in_other_layouts_with_the_same_alpha(base: Base) -> None:
    run("run_many", 1, jobs=[{"run": str(base.root / "eslm"), "data": base.data, "train__eslm": OPTIONS}])
    want = base.rows("eslm")
    alphas = [want[s]["selection_alpha"] for s in range(1, 9)]
    assert alphas[:4] == [0.0, 0.0, 0.3, 0.3] and len(set(alphas[3:])) == 5
    assert all(want[s]["selected_share"] == pytest.approx(1 - a, abs=1 / 64) for s, a in enumerate(alphas, 1))
    spent = [want[s]["executed_flops"] for s in range(1, 9)]
    steps = np.array([spent[0], *(b - a for a, b in itertools.pairwise(spent))])
    assert steps / steps[0] == pytest.approx([1.0, 1.0, *[4 / 3] * 6])  # a forward for scores beside 3 x forward
    jobs = [base.copy(name, source="eslm") | {"train__eslm": OPTIONS} | more for name, more in LAYOUTS.items()]
    run("run_many", 2, jobs=jobs)
    keys = ("loss", "grad_norm", "validation_loss", "selection_alpha", "selected_loss", "selection_threshold")
    for name, key in itertools.product(LAYOUTS, keys):
        got = base.rows(name)
        a, b = ([rows[s][key] for s in range(4, 9) if key in rows[s]] for rows in (want, got))
        np.testing.assert_allclose(b, a, RTOL, ATOL, err_msg=f"{name}: {key}")
