"""Decoding of PonderLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Run


class PonderLM(DecodingMethod):
    """Between two passes every token's embedding adds the expected embedding of its next token.

    With `feedback: hidden` it adds the token's state instead, with `projected` a linear map of it.
    """

    name = "ponderlm"
    defaults = {"steps": 3, "topk": 0, "multiply_by_steps": False, "feedback": "mixture"}
    training_only = ("draw", "draw_from", "draw_to", "grow_steps", "grow")

    def modules(self) -> dict[str, nn.Module]:
        width = self.config.hidden_size
        return {"projection": nn.Linear(width, width)} if self.options["feedback"] == "projected" else {}

    def _fed_back(self, model: Any, h: Tensor) -> Tensor:
        if self.options["feedback"] == "mixture":
            return self.mixture(model, h, self.options["topk"])
        return h if self.options["feedback"] == "hidden" else model.method["projection"](h)

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net, steps = model.model, self.options["steps"]
        factor = steps if self.options["multiply_by_steps"] else 1
        x = net.embed(net.embed_tokens(ids), run.positions, factor)
        for index in range(steps):
            x = x + self._fed_back(model, net.norm(net.stack(x, index, run.view(index))))
        return net.norm(net.stack(x, steps, run.view(steps)))
