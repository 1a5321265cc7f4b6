"""Which tokens a step trains on (ESLM, arXiv 2505.19893), and with what weight.

Of the M valid tokens of a scope, with scores s (the cross entropy, or the entropy of the distribution that predicts
the token, of the last pass; FP32, no gradient):

    tau  = the floor(alpha M)-th smallest s, counted from 0
    kept = valid tokens with s >= tau, K of them: M - floor(alpha M), more where others equal tau
    w    = M / K for kept tokens, 0 for others
    loss = (1 / N) sum_t w_t l_t,  N: valid tokens of the global batch

With one scope this is the mean loss of the kept tokens; with scores that are losses, the conditional value at risk at
alpha.  A global scope is the global batch.  Where a rank runs it in several micro-batches, no loss can be
differentiated before all scores are known, so the step first runs forward once for the scores, and the weights then
lie in the micro-batches.  Otherwise the scores are gathered where the loss is computed: over the ranks that share the
micro-batch's sequences, or, of a global scope, over all that run other tokens.

Published are score, quantile and mean of the kept.  Ours: the order statistic with >= (by the strict definition of the
quantile equal scores would all be dropped), and that a micro-batch weighs as many tokens as it has.

Shapes: n tokens of this rank, b micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaponder.config.eslm import Eslm
from megaponder.engine.groups import Groups

STATS = ("selected_loss", "selected_share", "selection_threshold")
"""Means over the valid tokens of a step: of w l, of kept, and of the threshold that each was compared with."""
PREFIX = "loss "
"""Of their names among a micro-batch's sums: like losses, they are the same on all tensor ranks."""


def quantile(scores: Tensor, valid: Tensor, alpha: Tensor) -> Tensor:
    """tau of flat scores, of which those where `valid` (bool) count; inf if none does."""
    ordered = torch.where(valid, scores, torch.inf).sort().values
    # alpha M may fall short of a whole number by a rounding error
    index = (alpha.double() * valid.sum() + 1e-9).floor().long().clamp(max=len(scores) - 1)
    return ordered.gather(0, index[None])[0]


@dataclass
class Weighed:
    """What the scores of a micro-batch lead to."""

    weights_nb: Tensor
    """FP32, 0 for tokens that are left out."""
    threshold: Tensor | None
    """None: not known here."""


class Selection:
    """The selection of one stage; only the last one selects."""

    def __init__(self, options: Eslm, groups: Groups):
        self.options, self._groups = options, groups
        self.alpha = options.alpha
        self._alpha = torch.tensor(options.alpha, dtype=torch.float64, device=groups.device)

    def set_alpha(self, alpha: float) -> None:
        """For the steps that follow; in place, since captured passes read it."""
        self.alpha = alpha
        self._alpha.fill_(alpha)

    def score(self, losses_nb: Tensor, entropy_nb: Tensor | None) -> Tensor:
        """Scores with the same bits on all tensor ranks."""
        found = losses_nb if self.options.by == "loss" else entropy_nb
        assert found is not None
        found = found.detach().clone()
        if self._groups.tp_size > 1:
            dist.broadcast(found, src=dist.get_global_rank(self._groups.tp, 0), group=self._groups.tp)
        return found

    def weigh(self, scores_nb: Tensor, mask_nb: Tensor) -> Weighed:
        """The weights of a micro-batch from its own scores; with a global scope, the only one of each rank."""
        wide = self.options.scope == "global"
        group = self._groups.dp_cp if wide else self._groups.cp if self._groups.cp_size > 1 else None
        (found,) = self._weigh([(scores_nb, mask_nb)], group)
        return found

    def weigh_all(self, scores: list[tuple[Tensor, Tensor]]) -> list[Weighed]:
        """The weights of all micro-batches of this rank, from (scores, mask) of each: their scope is the global
        batch."""
        return self._weigh(scores, self._groups.dp_cp)

    def _weigh(self, scores: list[tuple[Tensor, Tensor]], group: Any) -> list[Weighed]:
        flat = torch.stack(
            [torch.cat([part.flatten() for part in parts]).float() for parts in zip(*scores, strict=True)]
        )
        if group is not None and group.size() > 1:
            everyone = [torch.empty_like(flat) for _ in range(group.size())]
            dist.all_gather(everyone, flat, group=group)
            flat = torch.cat(everyone, dim=1)
        valid = flat[1] > 0
        threshold = quantile(flat[0], valid, self._alpha)
        weight = valid.sum() / (valid & (flat[0] >= threshold)).sum().clamp(min=1)
        return [Weighed((s >= threshold) * mask * weight, threshold) for s, mask in scores]


def sums(weighed: Weighed, losses_nb: Tensor, mask_nb: Tensor) -> dict[str, Tensor]:
    """`STATS` as sums over this rank's valid tokens."""
    values = [(weighed.weights_nb * losses_nb.detach()).sum(), (weighed.weights_nb > 0).float().sum()]
    values += [] if weighed.threshold is None else [threshold_sum(weighed.threshold, mask_nb)]
    return {PREFIX + name: value for name, value in zip(STATS, values, strict=False)}


def threshold_sum(threshold: Tensor, mask: Tensor) -> Tensor:
    """Over valid tokens, all of which were compared with it; 0 where none counts."""
    return torch.where(mask.sum() > 0, threshold, torch.zeros_like(threshold)) * mask.sum()
