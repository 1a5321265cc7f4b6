"""Decoding of PonderLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Run


class PonderLM(DecodingMethod):
    """Between two passes every token's embedding adds the expected embedding of its next token."""

    name = "ponderlm"
    defaults = {"steps": 3, "topk": 0, "multiply_by_steps": False}
    training_only = ("draw", "draw_from", "draw_to", "grow_steps", "grow")

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net, steps = model.model, self.options["steps"]
        factor = steps if self.options["multiply_by_steps"] else 1
        x = net.embed(net.embed_tokens(ids), run.positions, factor)
        for index in range(steps):
            x = x + self.mixture(model, net.norm(net.stack(x, index, run.view(index))), self.options["topk"])
        return net.norm(net.stack(x, steps, run.view(steps)))
