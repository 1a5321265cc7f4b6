"""Ten steps on DeepSpeed are those of megatron-core, at every stage; what a stage holds is planned."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megaponder.plan.zero import states
from tests.distributed import run_workers
from tests.engine.zero_workers import BF16, Choice, configured
from tests.layouts.cases import WHOLE
from tests.tolerance import PARITY, RTOL, STEPS_BF16

pytest.importorskip("deepspeed")
COUNT = 10
ALL: list[Choice] = [
    (0, "none", "none"),
    (1, "none", "none"),
    (1, "optimizer", "none"),
    (2, "none", "none"),
    (2, "optimizer", "none"),
    (3, "none", "none"),
    (3, "optimizer", "none"),
    (3, "weights", "layer"),
]
TWO: list[Choice] = [(2, "none", "none"), (3, "none", "none")]
DRAWN = "loop-drawn-gqa"
CASES: dict[str, list[Choice]] = {
    DRAWN: ALL,  # 2 to 4 passes
    "ponderlm-pythia": TWO,
    "ponderlm2-llama-gqa": TWO,
    "adaponderlm-budget-skip": TWO,  # halted tokens are left out, and a buffer is settled after each step
    f"ponderlm-pythia{BF16}": [(1, "none", "none"), (2, "optimizer", "none"), *TWO],
}
MORE = ("loop-llama-gqa", "vanilla-llama-tied", "ponderlm2-drawn-pythia", "adaponderlm-budget", "ponderlm3-budget",
        "ponderlm-topk-gpt2-tied", "huginn-llama", "parcae-llama", "ouro-sandwich", "depth-across-gqa",
        "adaptive-cot-skip-gqa", "eslm-global", "everything-llama", "detached-llama")  # fmt: skip
"""Only with MEGAPONDER_WHOLE_MATRIX, with all that can be sharded, offloaded and recomputed."""


@pytest.fixture(scope="module")
def found() -> dict:
    cases = CASES | (dict.fromkeys(MORE, ALL[-1:]) if WHOLE else {})
    return run_workers("tests.engine.zero_workers:both", 2, args={"cases": cases, "count": COUNT}, timeout=1800)[0]


def test_steps_are_those_of_the_first_engine(found: dict):
    for (case, choice), one in found.items():
        first = found[case, None]
        want, got = np.array(first["rows"]), np.array(one["rows"])
        assert (got[:, 3] == want[:, 3]).all()
        near, norms = (STEPS_BF16, 10 * STEPS_BF16) if BF16 in case else (PARITY, RTOL)
        np.testing.assert_allclose(got[:, :2], want[:, :2], near, near, err_msg=f"{case} {choice}")
        np.testing.assert_allclose(got[:, 2], want[:, 2], norms, err_msg=f"{case} {choice}: gradient norm")
        np.testing.assert_allclose(one["evaluated"], first["evaluated"], near, err_msg=f"{case} {choice}")
        assert abs(want[-1, 0] - want[0, 0]) > 0.1, "nothing was learnt"
    passes = {row[3] for row in found[DRAWN, None]["rows"]}
    assert len(passes) > 1


def test_gradients_that_are_not_finite_are_seen_and_dropped(found: dict):
    bad = [norm for (_, choice), one in found.items() if choice is not None for norm in one["bad"]]
    assert len(bad) == len(found) - len({case for case, _ in found})
    assert not any(map(math.isfinite, bad))


def test_plan_counts_what_a_stage_holds(found: dict):
    from megaponder.plan.parameters import rank_parameters
    from megaponder.ponder.facts import facts_of
    from megaponder.ponder.settings import method_of

    for choice in ALL:
        cfg, held = configured(DRAWN, choice), found[DRAWN, choice]["held"]
        parameters = rank_parameters(cfg, facts_of(method_of(cfg), 1), 0)
        on_device = states(cfg, parameters, 4, 2)
        cfg.parallel.offload = "none"  # as much, but elsewhere
        weights, _, optimizer = states(cfg, parameters, 4, 2)
        if choice[0] == 0:
            held["optimizer"] -= held["weights"]  # the parameters themselves
        assert held["optimizer"] == pytest.approx(optimizer, rel=0.02), choice
        assert on_device[2] == (0 if choice[1] != "none" else optimizer), choice
        if choice[0] < 3:
            assert held["weights"] == weights, choice
        else:  # beside its share a rank holds no more than the plan says
            assert held["shards"] == pytest.approx(4 * parameters.total / 2, rel=0.02), choice
            assert held["weights"] + held["shards"] <= weights, choice


def test_weights_are_released_after_every_pass():
    first, second = run_workers("tests.engine.zero_workers:most_whole", 2, args={"case": "loop-llama-gqa", "layers": 6})
    assert first == second == {"forward": 3584, "backward": 3584, "model": 56832}  # MLP's gate and up of one layer
