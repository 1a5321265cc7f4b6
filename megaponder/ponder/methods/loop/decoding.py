"""Decoding of a looped stack."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Run


class Loop(DecodingMethod):
    """The stack runs extra_passes + 1 times; there is no norm and no new embedding in between."""

    name = "loop"
    defaults = {"extra_passes": 3}
    training_only = ("draw", "draw_from", "draw_to", "grow_steps", "grow")

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net = model.model
        x = net.embed(net.embed_tokens(ids), run.positions)
        for index in range(self.options["extra_passes"] + 1):
            x = net.stack(x, index, run.view(index))
        return net.norm(x)
