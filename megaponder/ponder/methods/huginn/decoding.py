"""Decoding of Huginn."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.noise import token_noise
from megaponder.decoding.passes import Run


class Recurrent(DecodingMethod):
    """Prelude, a core that is repeated from a random state, and coda."""

    needs_ids = True  # they seed the noise
    training_only = ("draw", "draw_from", "draw_to", "grow_steps", "grow", "kept")

    def entry_modules(self) -> dict[str, nn.Module]:
        return {"adapter": nn.Linear(2 * self.config.hidden_size, self.config.hidden_size, bias=False)}

    def state_scale(self) -> float:
        """Of the first state, over the papers' standard deviation of matrices."""
        return 1.0

    def between(self, model: Any, state: Tensor) -> Tensor:
        """What the coda reads of the last state."""
        return state

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net, o = model.model, self.options
        layers, r = len(net.layers), o["recurrence"]
        begin, end = o["prelude"], layers - o["coda"]
        view = run.view(0)
        e = net.stack(net.embed(net.words(ids), run.positions), 0, view, part=range(begin))
        std = math.sqrt(2 / (5 * e.shape[-1])) * self.state_scale()
        state = (std * token_noise(ids, run.positions, o["noise_seed"], -1, e.shape[-1])).to(e.dtype)
        for index in range(r):
            view = view if index == 0 else run.view(index)
            mixed = model.method_entry["adapter"](torch.cat([state, e], dim=-1))
            state = net.stack(mixed, index, view, part=range(begin, end))
        return net.norm(net.stack(self.between(model, state), r - 1, view, part=range(end, layers)))


class Huginn(Recurrent):
    """A token runs the prelude once, the core `recurrence` times and the coda once. Keys and values of each recurrence
    are cached by themselves."""

    name = "huginn"
    defaults = {"prelude": 2, "coda": 2, "recurrence": 32, "noise_seed": 0}

    def state_scale(self) -> float:
        return math.sqrt(self.config.hidden_size)

    def between(self, model: Any, state: Tensor) -> Tensor:
        return model.model.norm(state)
