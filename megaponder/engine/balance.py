"""How even a step's passes load the experts of a mixture: the loss, what is reported, and the experts' biases.

What is added to the gradient's loss, and how biases move after each update, by the load of all passes of the step:

    loss = aux_weight  sum over layers, mean over the layer's passes, of aux / N
           + weight of train.disciplines  the same of its loss / labelled targets
    bias_e <- bias_e + bias_rate sign(mean load - load of e), by the load that the bias's own router made

    aux: `backbone.moe`, over the sequences of the global batch; N: its valid targets, the denominator of all losses.
    Passes are those that train the layer: one for a layer of the prelude, which runs once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaponder.backbone.moe import AddLoss, Routed
from megaponder.config.disciplines import Disciplines
from megaponder.config.stages import run_in
from megaponder.decoding.moe_options import Experts
from megaponder.engine.groups import Groups
from megaponder.ponder.base import Pass

DISCIPLINE = "moe_discipline"
"""The same of `config.disciplines`' loss, without its weight, mean over layers; where a run has labels."""
NAMES = ("moe_balance", "moe_entropy", "moe_load_max", "moe_load_min")
"""Statistics of a training step: aux / N, mean over layers (1: even); entropy of the scores over ln E (1: even); the
largest and the smallest load of an expert, over the mean of its layer.  With several routers also by step, as
`moe_load_max_pass0`: the load that the router of that step made."""


class Balance:
    """Of the layers of one stage; `layers`: their numbers and their mixtures."""

    def __init__(
        self,
        options: Experts,
        layers: Sequence[tuple[int, Any]],
        total: int,
        core: tuple[int, int] | None,
        disciplines: Disciplines | None = None,
    ):
        self.disciplines = disciplines
        self.options, self._layers, self._core = options, layers, core
        self._loads, self._total = torch.zeros(0), total  # [layers, R, E]
        self._runs: dict[int, int] = {}
        self._tokens: Tensor | None = None
        self._sums = torch.zeros(0)

    def begin(self, passes: Sequence[Pass], tokens: Tensor, train: bool, labelled: Tensor) -> None:
        """A step with this plan and so many valid targets starts, of which `labelled` have a discipline; in evaluation
        nothing is counted."""
        self._tokens, self._labelled = tokens if train else None, labelled
        width = self.options.router_count * self.options.experts + 3
        self._sums = torch.zeros(self._total, width, dtype=torch.float64, device=tokens.device)
        prelude = self._core[0] if self._core else 0
        for number, _ in self._layers:
            one = range(number, number + 1)
            ran = [p for p in passes if run_in(one, p.layers) and (p.grad or (p.index == 0 and number < prelude))]
            self._runs[number] = max(1, len(ran))

    def add(self, number: int, rows: Tensor, routed: Routed | None) -> Tensor:
        """The rows that a layer returned; their backward is that of the balance loss, too."""
        if routed is None or self._tokens is None:
            return rows
        aux = routed.aux / (self._runs[number] * self._tokens)
        added, loss = torch.zeros_like(aux), self.options.aux_weight * aux
        if routed.discipline is not None and self.disciplines is not None:
            added = routed.discipline / (self._runs[number] * self._labelled)
            loss = loss + self.disciplines.weight * added
        if routed.aux.requires_grad:
            own = torch.stack([aux.detach(), routed.entropy, added.detach()])
            rows = AddLoss.apply(rows, loss)
        else:
            own = torch.stack([torch.zeros_like(aux), routed.entropy, torch.zeros_like(aux)])
        self._sums[number] += torch.cat([routed.load.flatten(), own])
        return rows

    def collect(self, groups: Groups) -> dict[str, float]:
        """`NAMES` of the step, equal on every rank."""
        for group in (groups.tp, groups.dp_cp, groups.pp):
            if group.size() > 1:
                dist.all_reduce(self._sums, group=group)
        self._tokens, e = None, self.options.experts
        made, aux, entropy, labelled = self._sums.split([self._sums.shape[1] - 3, 1, 1, 1], dim=1)
        self._loads = made.unflatten(1, (-1, e))
        loads = self._loads.sum(1)
        rows = loads.sum(1, keepdim=True) / self.options.top_k
        spread = float((entropy / rows.clamp(min=1e-12)).mean()) / math.log(e)
        found = dict(zip(NAMES, (float(aux.mean()), spread, *_extremes(loads)), strict=True))
        if self.options.router_count > 1:
            for step, own in enumerate(self._loads.unbind(1)):
                if bool(own.any()):  # else no pass of this training step had it
                    found |= dict(zip((f"{name}_pass{step}" for name in NAMES[2:]), _extremes(own), strict=True))
        if self.disciplines is not None:
            found[DISCIPLINE] = float(labelled.mean())
        return found

    @torch.no_grad()
    def settle(self) -> None:
        """Move the biases, if there are any, after an update."""
        for number, mixture in self._layers:
            bias = mixture.router.expert_bias
            if bias is not None and mixture.router.weight.requires_grad and len(self._loads):
                mean = self._loads[number].mean(1, keepdim=True)
                below = mean - self._loads[number]
                below[below.abs() < 1e-6 * mean] = 0.0  # rounding of a sum in another order
                bias += self.options.bias_rate * below.sign().flatten().to(bias)


def _extremes(loads: Tensor) -> tuple[float, float]:
    """The largest and the smallest load [layers, E] of an expert, over the mean of its layer."""
    even = loads / loads.mean(1, keepdim=True).clamp(min=1e-12)
    return float(even.max()), float(even.min())
