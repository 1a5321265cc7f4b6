"""Decoding of PonderLM-2."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megaponder.ponder.methods.latents.decoding import Latents


class PonderLM2(Latents):
    """The last latent is read out; `softmax_feedback` feeds the expected embedding of the next token."""

    name = "ponderlm2"
    defaults = {"latents": 1, "jacobi": 3, "softmax_feedback": False, "topk": 0}
    training_only = ("jacobi_from", "jacobi_to")

    def feed(self, model: Any, h: Tensor) -> Tensor:
        return self.mixture(model, h, self.options["topk"]) if self.options["softmax_feedback"] else h
