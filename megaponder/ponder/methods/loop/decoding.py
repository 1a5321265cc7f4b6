"""Decoding of a looped stack."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megaponder.decoding.steps import State, Stepwise


class Loop(Stepwise):
    """The stack runs extra_passes + 1 times; there is no norm and no new embedding in between."""

    name, extends = "loop", True
    defaults = {"extra_passes": 3}
    training_only = ("draw", "draw_from", "draw_to", "grow_steps", "grow")

    @classmethod
    def repeats(cls, options: dict[str, Any]) -> int:
        return int(options["extra_passes"]) + 1

    def trained(self) -> int:
        return int(self.options["extra_passes"]) + 1

    def leave(self, model: Any, index: int | Tensor, h: Tensor, state: State, positions: Tensor) -> bool | Tensor:
        go_on = index + 1 < self.deepest()
        state["x"] = h
        if go_on is not True:
            state["out"] = model.model.norm(h)
        return go_on
