"""Decoding of PonderLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megaponder.decoding.feedback import FeedbackGate
from megaponder.decoding.steps import State, Stepwise


class PonderLM(Stepwise):
    """Between two passes every token's embedding adds the expected embedding of its next token.

    With `feedback: hidden` it adds the token's state instead, with `projected` a linear map of it.
    """

    name, extends = "ponderlm", True
    why_not_plain = "each pass adds a mixture of embeddings, which takes the head between passes"
    defaults = {
        "steps": 3,
        "topk": 0,
        "multiply_by_steps": False,
        "feedback": "mixture",
        "accumulate": True,
        "gentle_start": False,
    }
    training_only = ("draw", "draw_from", "draw_to", "grow_steps", "grow")

    def modules(self) -> dict[str, nn.Module]:
        width, made = self.config.hidden_size, dict[str, nn.Module]()
        if self.options["feedback"] == "projected":
            made["projection"] = nn.Linear(width, width)
        if self.options["gentle_start"]:
            made["feedback_gate"] = FeedbackGate()
        return made

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        return bool(self.options["feedback"] == "mixture")

    def _fed_back(self, model: Any, h: Tensor, logits: Tensor | None) -> Tensor:
        if self.mixes:
            h = self.mixture(model, h, self.options["topk"], logits)
        elif self.options["feedback"] == "projected":
            h = model.method["projection"](h)
        return model.method["feedback_gate"](h) if self.options["gentle_start"] else h

    def trained(self) -> int:
        return int(self.options["steps"]) + 1

    def begin(self, model: Any, ids: Tensor, positions: Tensor) -> State:
        net, factor = model.model, self.options["steps"] if self.options["multiply_by_steps"] else 1
        x = net.embed(net.words(ids), positions, factor)
        return {"x": x} if self.options["accumulate"] else {"x": x, "first": x}

    def enter(self, model: Any, index: int | Tensor, state: State) -> None:
        before = state["x"] if self.options["accumulate"] else state["first"]
        state["x"] = before + self._fed_back(model, state["out"], state.get("head"))
