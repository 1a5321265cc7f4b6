"""Decoding with aligned halting: what adaponderlm, pruned_ponderlm and confident_ponderlm share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megaponder.decoding.feedback import FeedbackGate
from megaponder.decoding.steps import State, Stepwise, flag
from megaponder.decoding.window import Window, window


class AlignedDecoding(Stepwise):
    """A token continues while `decide` says so, and adds its weighted mixture.

    A halted token keeps its last state and, in all deeper passes, the keys and values of the pass in which it halted.
    """

    halts = mixes = True
    why_not_plain = "tokens stop at different passes, and each pass adds a mixture of embeddings"

    def modules(self) -> dict[str, nn.Module]:
        return {"feedback_gate": FeedbackGate()} if self.options.get("gentle_start") else {}

    def decide(self, model: Any, index: int | Tensor, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(weight of the mixture, whether a token continues), both [...], of normed states h [..., H]."""
        raise NotImplementedError

    @property
    def window(self) -> Window | None:
        """Passes that a budget leaves open."""
        return window(self.options["target"], self.options["steps"] + 1) if self.options.get("target") else None

    def trained(self) -> int:
        return int(self.options["steps"]) + 1 if self.window is None else self.window.most

    def leave(self, model: Any, index: int | Tensor, h: Tensor, state: State, positions: Tensor) -> bool | Tensor:
        state["out"] = model.model.norm(h)
        deeper = index + 1 < self.deepest()
        if not isinstance(deeper, Tensor) and not deeper:
            return False
        state["weight"], go_on = self.decide(model, index, state["out"], positions)
        return go_on & flag(deeper, h)

    def enter(self, model: Any, index: int | Tensor, state: State) -> None:
        mixture = self.mixture(model, state["out"], self.options["topk"], state.get("head"))
        fed = state["weight"].to(mixture.dtype)[..., None] * mixture
        state["x"] = state["x"] + (model.method["feedback_gate"](fed) if self.options.get("gentle_start") else fed)
