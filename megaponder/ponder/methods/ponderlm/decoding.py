"""Decoding of PonderLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megaponder.decoding.steps import State, Stepwise


class PonderLM(Stepwise):
    """Between two passes every token's embedding adds the expected embedding of its next token.

    With `feedback: hidden` it adds the token's state instead, with `projected` a linear map of it.
    """

    name, extends = "ponderlm", True
    defaults = {"steps": 3, "topk": 0, "multiply_by_steps": False, "feedback": "mixture"}
    training_only = ("draw", "draw_from", "draw_to", "grow_steps", "grow")

    def modules(self) -> dict[str, nn.Module]:
        width = self.config.hidden_size
        return {"projection": nn.Linear(width, width)} if self.options["feedback"] == "projected" else {}

    def _fed_back(self, model: Any, h: Tensor) -> Tensor:
        if self.options["feedback"] == "mixture":
            return self.mixture(model, h, self.options["topk"])
        return h if self.options["feedback"] == "hidden" else model.method["projection"](h)

    def trained(self) -> int:
        return int(self.options["steps"]) + 1

    def begin(self, model: Any, ids: Tensor, positions: Tensor) -> State:
        net, factor = model.model, self.options["steps"] if self.options["multiply_by_steps"] else 1
        return {"x": net.embed(net.embed_tokens(ids), positions, factor)}

    def enter(self, model: Any, index: int | Tensor, state: State) -> None:
        state["x"] = state["x"] + self._fed_back(model, state["out"])
