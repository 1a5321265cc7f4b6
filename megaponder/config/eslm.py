"""Options of `train.eslm`, without tensors, so that rules and plans can ask: which tokens a step trains on.

ESLM (arXiv 2505.19893): every token gets a score without gradient; the share `alpha` of the tokens with the lowest
scores is left out of the loss.  `engine.selection` selects, `training.selection` moves alpha.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

SCORES = ("loss", "entropy")
SCOPES = ("micro", "global")


@dataclass(frozen=True)
class Eslm:
    """`train.eslm` with its defaults filled in."""

    by: str
    """The score: a token's cross entropy, or the entropy of the distribution that predicts it."""
    alpha: float = 0.1
    """Share of the tokens that is left out."""
    scope: str = "micro"
    """Whose quantile the threshold is: the micro-batch's, or the global batch's."""
    warmup: int = 0
    """First steps, which train on all tokens."""
    adapt: float = 0.0
    """Exponent with which alpha follows the selected tokens' loss (`training.selection`); 0: it stays."""
    alpha_range: tuple[float, float] = (0.0, 0.5)
    """Where alpha stays if it moves."""

    def scores_first(self, micro_batches: int, step: int | None = None) -> bool:
        """Whether a step runs all of a rank's micro-batches forward once more, before it trains on them."""
        return self.scope == "global" and micro_batches > 1 and (step is None or step > self.warmup)


OPTIONS = tuple(f.name for f in fields(Eslm))


def read(given: dict[str, Any] | None) -> Eslm | None:
    """The options; None: every token counts."""
    if not given:
        return None
    made = dict(given)
    if "alpha_range" in made:
        made["alpha_range"] = tuple(made["alpha_range"])
    return Eslm(**made)
