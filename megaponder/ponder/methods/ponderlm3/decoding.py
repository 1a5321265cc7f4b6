"""Decoding of PonderLM-3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.backbone import linear
from megaponder.ponder.methods.latents.decoding import Latents


class PonderLM3(Latents):
    """Latents of which a router on slot 0 grants each token some: w_k = its probability of at least k latents.

    Soft (training): log w_k is added to the logits of the key of latent k, all latents are run and read out by the
    router's probabilities.  Hard (decoding): the same with latents of w_k < threshold left out altogether, without
    renormalisation; this differs from soft by O(threshold).  A pass over sequences takes w from the pass before it.
    """

    name = "ponderlm3"
    as_trained = {"threshold": 0.0}
    defaults = {"latents": 3, "jacobi": 3, "threshold": 1e-4}
    training_only = (
        *("jacobi_from", "jacobi_to", "cost_weight", "target_depth"),
        *("ramp_start", "ramp_end", "router_bias"),
    )

    def modules(self) -> dict[str, nn.Module]:
        return {"router": nn.Linear(self.config.hidden_size, self.options["latents"] + 1)}

    def route(self, model: Any, h: Tensor) -> Tensor:
        return linear(model.method["router"], h)

    def weights(self, a: Tensor | None, slots: slice, hard: bool) -> dict[str, Any]:
        if a is None:
            return {}  # nothing is known before the first pass, which has slot 0 alone
        weight = log_tails(a)[..., slots]
        return {
            "weight": weight.flatten(1, 2),
            "alive": (weight.exp() >= self.options["threshold"]).flatten(1, 2) if hard else None,
        }

    def readout(self, h: Tensor, a: Tensor | None, hard: bool) -> Tensor:
        assert a is not None
        share = a.softmax(-1)
        if hard:
            share = share * (log_tails(a).exp() >= self.options["threshold"])
        return (share[..., : h.shape[2], None].to(h.dtype) * h).sum(2)


def log_tails(a: Tensor) -> Tensor:
    """log of w_k = sum_{j >= k} softmax(a)_j; the first is exactly 0."""
    tails = torch.logcumsumexp(a.flip(-1), dim=-1).flip(-1)
    return tails - tails[..., :1]
