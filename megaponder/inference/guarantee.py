"""Thresholds with a guarantee: Learn-then-Test (arXiv 2110.01052) over a sequence of thresholds, the safest first.

R(x) is the expectation of a risk in [0, 1] of a random text with threshold x.  From n independent texts, with r their
mean risk, the Hoeffding-Bentkus p-value of "R(x) > a" is

    p = min(exp(-n h(min(r, a), a)), e P(Bin(n, a) <= ceil(n r)))      h(r, a) = r log(r/a) + (1-r) log((1-r)/(1-a))

Thresholds are tested in an order that was fixed before the texts were seen, each at 1 - confidence, up to the first
that is not below it; the one before it is chosen.  With probability `confidence` over the draw of the texts, R of
what is chosen is at most a, whatever the distribution of texts: a bad threshold can only be chosen if the first bad one
in the order is passed.  With r = 0, p is (1 - a)^n, so fewer texts than `fewest` can never do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def binomial_tail(k: int, n: int, a: float) -> float:
    """P(Bin(n, a) <= k) for 0 < a < 1, summed from its largest term downwards."""
    if k >= n:
        return 1.0
    if k < 0:
        return 0.0
    log_a, log_b, base = math.log(a), math.log1p(-a), math.lgamma(n + 1)
    terms = [base - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * log_a + (n - i) * log_b for i in range(k + 1)]
    most = max(terms)
    return min(1.0, math.exp(most) * math.fsum(math.exp(t - most) for t in terms))


def p_value(risk: float, n: int, bound: float) -> float:
    """Of "the expected risk is more than `bound`", from the mean risk of n texts."""
    r = min(max(risk, 0.0), 1.0)
    low = min(r, bound)
    relative = (low * math.log(low / bound) if low else 0.0) + (1 - low) * math.log((1 - low) / (1 - bound))
    bentkus = math.e * binomial_tail(math.ceil(n * r - 1e-9), n, bound)
    return min(1.0, math.exp(-n * relative), bentkus)


def fewest(bound: float, confidence: float) -> int:
    """Texts with which a threshold without any risk passes."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - bound) - 1e-9)


@dataclass(frozen=True)
class Tested:
    """A threshold, its mean risk on the texts, and the p-value."""

    threshold: float
    risk: float
    p: float


def fixed_sequence(
    thresholds: Sequence[float], risk_of: Callable[[float], float], n: int, bound: float, confidence: float
) -> tuple[int | None, list[Tested]]:
    """Index of the last threshold that passes (None: not even the first), and what was tested."""
    found: list[Tested] = []
    for i, threshold in enumerate(thresholds):
        risk = risk_of(threshold)
        found.append(Tested(threshold, risk, p_value(risk, n, bound)))
        if found[-1].p > 1 - confidence:
            return (i - 1 if i else None), found
    return len(thresholds) - 1, found
