"""What a chosen threshold promises, against exact sums and repeated draws."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from megaponder.inference.guarantee import binomial_tail, fewest, fixed_sequence, p_value
from tests.tolerance import RTOL


@pytest.mark.parametrize(("n", "a"), [(1, "1/2"), (20, "1/20"), (97, "3/10"), (400, "1/50")])
def test_binomial_tails_are_exact(n: int, a: str) -> None:
    share, total = Fraction(a), Fraction(0)
    for k in range(n + 1):
        total += math.comb(n, k) * share**k * (1 - share) ** (n - k)
        assert binomial_tail(k, n, float(share)) == pytest.approx(float(total), rel=RTOL)
    assert binomial_tail(-1, n, float(share)) == 0.0 and binomial_tail(n + 3, n, float(share)) == 1.0


@pytest.mark.parametrize("bound", [0.02, 0.05, 0.3])
@pytest.mark.parametrize("n", [20, 100, 700])
def test_p_values_are_valid_and_of_use(n: int, bound: float) -> None:
    """For texts with a risk of 0 or 1 at the bound itself, p <= d in at most d of all draws: an exact sum.  And p falls
    with the risk, to (1 - bound)^n without any."""
    mass = [math.comb(n, k) * bound**k * (1 - bound) ** (n - k) for k in range(n + 1)]
    values = [p_value(k / n, n, bound) for k in range(n + 1)]
    for d in (0.01, 0.05, 0.2, 0.5):
        assert sum(m for m, p in zip(mass, values, strict=True) if p <= d) <= d
    assert values == sorted(values) and values[-1] == 1.0
    assert values[0] == pytest.approx((1 - bound) ** n, rel=RTOL)


def test_fewest_texts() -> None:
    for bound, confidence in ((0.05, 0.95), (0.02, 0.9), (0.3, 0.99), (0.5, 0.5)):
        n = fewest(bound, confidence)
        assert p_value(0.0, n, bound) <= 1 - confidence + 1e-12 < p_value(0.0, n - 1, bound) or n == 1
    assert fewest(0.05, 0.95) == 59


BOUND, CONFIDENCE, DRAWS = 0.1, 0.9, 400
RISKS = {
    "rising": [0.01, 0.03, 0.06, 0.09, 0.11, 0.15, 0.3],
    "at the bound": [0.02, 0.101, 0.101, 0.101, 0.101],
    "not monotone": [0.02, 0.12, 0.03, 0.11, 0.01],
}
"""Expected risks of thresholds in their order."""


@pytest.mark.parametrize("name", list(RISKS))
@pytest.mark.parametrize("n", [60, 250])
def test_repeated_draws_keep_the_confidence(name: str, n: int) -> None:
    """Texts whose risks are spread by a beta distribution, the same texts for all thresholds: a threshold beyond the
    bound is chosen in at most 1 - confidence of the draws; by the means alone it would be far more often."""
    risks, draw = np.array(RISKS[name]), np.random.default_rng(7)
    broken, naive, chosen = 0, 0, []
    for _ in range(DRAWS):
        whole = draw.random(n) < risks[:, None]  # hard texts are hard at every threshold
        spread = draw.beta((4 * risks)[:, None], (4 * (1 - risks))[:, None], (len(risks), n))
        means = np.where(draw.random(n) < 0.5, whole, spread).mean(1)
        at, tested = fixed_sequence(range(len(risks)), means.tolist().__getitem__, n, BOUND, CONFIDENCE)
        passed = -1 if at is None else at
        assert len(tested) == min(passed + 2, len(risks)) and all(t.p <= 1 - CONFIDENCE for t in tested[: passed + 1])
        chosen.append(passed)
        broken += passed >= 0 and risks[passed] > BOUND
        naive += any(mean <= BOUND < risk for mean, risk in zip(means, risks, strict=True))
    limit = 1 - CONFIDENCE
    assert broken <= DRAWS * limit + 3 * math.sqrt(DRAWS * limit * (1 - limit)) < naive
    assert n < 100 or sum(at >= 0 for at in chosen) > 0.9 * DRAWS
