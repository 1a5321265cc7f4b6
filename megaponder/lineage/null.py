"""What unrelated models would score, measured on the two models at hand: their tokens are paired at random.

Both methods know the correspondence of two models from their shared tokens alone.  With tokens paired at random the
matrices keep all that they have, heavy tails and spectra included, and only the correspondence is gone.  Models that
were trained independently on the same text score higher than that, since equal tokens play equal parts in both; so a
verdict also asks for a least score.  `python -m benchmarks.lineage` measures such models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megaponder.lineage import awm, huref
from megaponder.lineage.weights import Model

DRAWS = 8
RELATED, UNRELATED = 6.0, 3.0
"""Standard deviations above the null from which models are related, and below which they are not (chosen here)."""
RELATED_SCORE, UNRELATED_SCORE = 0.3, 0.2
"""The same of scores (chosen here): independently trained pairs had up to 0.16, offspring 0.88 or more, in
benchmarks/results/lineage.md."""


@dataclass(frozen=True)
class Null:
    """Scores of random pairings."""

    scores: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(torch.tensor(self.scores, dtype=torch.float64).mean())

    @property
    def sd(self) -> float:
        """Standard deviation, of two draws or more."""
        return float(torch.tensor(self.scores, dtype=torch.float64).std())

    def z(self, score: float) -> float:
        """Standard deviations that a score lies above the mean."""
        return (score - self.mean) / max(self.sd, 1e-12)


def of_awm(a: Model, b: Model, ids: tuple[Tensor, Tensor], mode: awm.Mode, draws: int = DRAWS) -> Null:
    """AWM's scores with the second model's tokens in random order."""
    return Null(tuple(awm.compare(a, b, (ids[0], ids[1][order]), mode).score for order in _orders(len(ids[0]), draws)))


def of_huref(a: huref.Fingerprint, b: huref.Fingerprint, draws: int = DRAWS) -> Null:
    """ICS with the second model's tokens in random order."""
    one, other = huref.standardised(a.terms), huref.standardised(b.terms)
    found = [huref.correlations(one, other[:, o][:, :, o]) for o in _orders(len(a.ids), draws)]
    return Null(tuple(sum(c) / len(c) for c in found))


def _orders(n: int, draws: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randperm(n, generator=generator) for _ in range(draws)]


def verdict(score: float, null: Null) -> str:
    """related, unrelated or inconclusive."""
    z = null.z(score)
    if z >= RELATED and score >= RELATED_SCORE:
        return "related"
    return "unrelated" if z < UNRELATED or score < UNRELATED_SCORE else "inconclusive"
