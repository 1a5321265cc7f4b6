"""From the last pass's readout to a micro-batch's results: the loss to differentiate, and sums to report."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megaponder.engine import depth
from megaponder.engine.method_tools import StageExitTools
from megaponder.ponder.base import Readout


@dataclass
class Objective:
    """Share of one micro-batch in the global batch's means."""

    total: Tensor
    """Loss, or the method's own one, plus auxiliary loss."""
    sums: dict[str, Tensor]
    """Loss, auxiliary loss and the method's statistics, each divided by the global token count; no gradient."""
    by_token: Tensor | None = None
    """Evaluation of a method with halting: for every vocabulary entry the sum of its tokens' depths, and their number,
    over this rank's valid tokens: [2, V]."""
    scores_nb: Tensor | None = None
    """Of a forward that only asks for scores: `Selection.score` of the micro-batch's tokens."""


def objective(
    out: Readout, losses_nb: Tensor, tools: StageExitTools, tokens: Tensor, weights_nb: Tensor | None = None
) -> Objective:
    """`losses_nb`: cross entropy of every token of the micro-batch; `tokens`: valid targets of the global batch;
    `weights_nb`: of the tokens' losses in what is differentiated, where not all valid ones count alike."""
    lm = (losses_nb * tools.full_mask_nb).sum() / tokens
    weights_nb = tools.full_mask_nb if weights_nb is None else weights_nb
    if out.loss is None:
        total = (losses_nb * weights_nb).sum() / tokens
    else:
        total = (out.loss.float() * tools.sharded(weights_nb)).sum() / tokens
    sums = {"loss": lm.detach()}
    if out.aux is not None:
        aux = out.aux.float() / tokens
        total = total + aux
        sums["aux"] = aux.detach()
    stats = dict(out.stats)
    if out.depth is not None:
        own = tools.sharded(losses_nb.detach())
        stats |= depth.sums(out.depth, own, tools.valid_sb, out.gates, tools.max_depth)
    for name, value in stats.items():
        sums[name] = value.detach().float() / tokens
    by_token = None
    if out.depth is not None and tools.step is None:
        by_token = depth.by_token(out.depth, tools.ids_sb, tools.valid_sb, tools.vocab_size)
    return Objective(total, sums, by_token)
