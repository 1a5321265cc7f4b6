"""Decoding of PonderLM-3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.backbone import linear
from megaponder.decoding.configuration import MegaponderConfig
from megaponder.decoding.gates import Gates
from megaponder.decoding.window import window
from megaponder.ponder.methods.latents.decoding import Latents


class PonderLM3(Latents):
    """Latents of which a router on slot 0 grants each token some: w_k = its probability of at least k latents.

    Soft (training): log w_k is added to the logits of the key of latent k, all latents are run and read out by the
    router's probabilities.  Hard (decoding): the same with latents of w_k < threshold left out altogether, and exit
    masses of the others that sum to 1; this differs from soft by O(threshold).  A pass over sequences takes w from the
    pass before it.  With a target, scores of slot 0 decide which latents a token has, in training as in decoding, and
    w is 0 at others.
    """

    name = "ponderlm3"
    as_trained = {"threshold": 0.0}
    defaults = {"latents": 3, "jacobi": 3, "target": 0.0, "gate_width": 4, "threshold": 1e-4}
    training_only = (
        *("jacobi_from", "jacobi_to", "cost_weight", "target_depth"),
        *("ramp_start", "ramp_end", "router_bias", "explore", "score_weight"),
    )

    def __init__(self, config: MegaponderConfig):
        super().__init__(config)
        target, rows = self.options["target"], self.options["latents"] + 1
        self.window = window(target, rows) if target else None
        if self.window is not None:
            self.options["latents"] = self.window.most - 1

    def modules(self) -> dict[str, nn.Module]:
        width, found = self.config.hidden_size, self.window
        budget = {} if found is None else {"budget": Gates(width, self.options["gate_width"], found.gates)}
        return {"router": nn.Linear(width, self.options["latents"] + 1), **budget}

    def route(self, model: Any, h: Tensor) -> Tensor:
        a = linear(model.method["router"], h)
        if self.window is None:
            return a
        rows = [torch.ones_like(a[..., 0], dtype=torch.bool)] * self.window.least
        for gate in range(self.window.gates):
            rows.append(rows[-1] & model.method["budget"].go_on(gate, h))
        return a.masked_fill(~torch.stack(rows, dim=-1), DEAD)

    def weights(self, a: Tensor | None, slots: slice, hard: bool) -> dict[str, Any]:
        if a is None:
            return {}  # nothing is known before the first pass, which has slot 0 alone
        weight = log_tails(a)[..., slots]
        return {
            "weight": weight.flatten(1, 2),
            "alive": self._alive(weight).flatten(1, 2) if hard or self.window is not None else None,
        }

    def _alive(self, log_w: Tensor) -> Tensor:
        return log_w.exp() >= self.options["threshold"] if self.window is None else log_w > DEAD / 2

    def granted(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = log_tails(a)
        alive = self._alive(weight)
        return weight, alive, a.softmax(-1) * alive

    def readout(self, h: Tensor, a: Tensor | None, hard: bool) -> Tensor:
        assert a is not None
        if hard:
            a = a.masked_fill(~self._alive(log_tails(a)), DEAD)
        return (a.softmax(-1)[..., : h.shape[2], None].to(h.dtype) * h).sum(2)


DEAD = -1e4
"""Logit of what does not exist."""


def log_tails(a: Tensor) -> Tensor:
    """log of w_k = sum_{j >= k} softmax(a)_j; the first is exactly 0."""
    tails = torch.logcumsumexp(a.flip(-1), dim=-1).flip(-1)
    return tails - tails[..., :1]
