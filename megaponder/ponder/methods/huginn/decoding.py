"""Decoding of Huginn."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.backbone import wide
from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.noise import token_noise
from megaponder.decoding.passes import Run, View


class Recurrent(DecodingMethod):
    """Prelude, a core that is repeated from a random state, and coda."""

    needs_ids = True  # they seed the noise
    training_only = ("draw", "draw_from", "draw_to", "grow_steps", "grow", "kept")
    arguments = ("passes", "exit_below")
    as_trained = {"exit_below": 0.0}

    def using(self, given: dict[str, Any]) -> Recurrent:
        made, passes, below = copy.copy(self), given.get("passes"), given.get("exit_below")
        if passes is not None:
            if passes < 1:
                raise ValueError(f"passes = {passes}: it must be at least 1")
            made.options = {**made.options, "recurrence": int(passes)}
        if below is not None:
            made.options = {**made.options, "exit_below": float(below)}
        return made

    def entry_modules(self) -> dict[str, nn.Module]:
        return {"adapter": nn.Linear(2 * self.config.hidden_size, self.config.hidden_size, bias=False)}

    def state_scale(self) -> float:
        """Of the first state, over the papers' standard deviation of matrices."""
        return 1.0

    def embedded(self, model: Any, e: Tensor) -> Tensor:
        """What each recurrence reads of the prelude's output."""
        return e

    def mixed(self, model: Any, state: Tensor, embedded: Tensor) -> Tensor:
        """Input of the core."""
        out: Tensor = model.method_entry["adapter"](torch.cat([state, embedded], dim=-1))
        return out

    def between(self, model: Any, state: Tensor) -> Tensor:
        """What the coda reads of the last state."""
        return state

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net, o = model.model, self.options
        layers, r = len(net.layers), o["recurrence"]
        begin, end = o["prelude"], layers - o["coda"]
        view = run.view(0)
        e = self.embedded(model, net.stack(net.embed(net.words(ids), run.positions), 0, view, part=range(begin)))
        std = math.sqrt(2 / (5 * e.shape[-1])) * self.state_scale()
        state = (std * token_noise(ids, run.positions, o["noise_seed"], -1, e.shape[-1])).to(e.dtype)
        for index in range(r):
            view = view if index == 0 else run.view(index)
            before, state = state, net.stack(self.mixed(model, state, e), index, view, part=range(begin, end))
            if o["exit_below"] and self._settled(before, state, run):
                break
        run.depth = torch.full_like(ids, index + 1)
        for left_out in range(index + 1, r):
            view = self._repeat(run, index, left_out, ids.shape[1], range(begin, end))
        return net.norm(net.stack(self.between(model, state), r - 1, view, part=range(end, layers)))

    def _settled(self, before: Tensor, state: Tensor, run: Run) -> bool:
        """Whether the last recurrence changed no real token's state by the share `exit_below` or more."""
        change = (wide(state) - wide(before)).norm(dim=-1) / wide(state).norm(dim=-1)
        return bool((change[run.real] < self.options["exit_below"]).all())

    @staticmethod
    def _repeat(run: Run, last: int, index: int, tokens: int, core: range) -> View:
        """A recurrence that is left out: later tokens see the keys and values of the last one that ran."""
        view = run.view(index)
        if run.cache is not None:
            for layer in core:
                stored = run.cache.layers[last * run.cache.layers_a_pass + layer]
                assert stored.keys is not None and stored.values is not None
                rows = (stored.keys[:, :, -tokens:], stored.values[:, :, -tokens:])
                run.cache.update(*rows, index * run.cache.layers_a_pass + layer)
        return view


class Huginn(Recurrent):
    """A token runs the prelude once, the core `recurrence` times and the coda once. Keys and values of each recurrence
    are cached by themselves. `passes` is another number of recurrences. With `exit_below` the core stops once a
    recurrence changes no new token's state by that share or more (published: 0.03); in the recurrences that are left
    out, later tokens see the keys and values of the last one that ran, which is an approximation."""

    name = "huginn"
    defaults = {"prelude": 2, "coda": 2, "recurrence": 32, "noise_seed": 0, "exit_below": 0.0}

    def state_scale(self) -> float:
        return math.sqrt(self.config.hidden_size)

    def between(self, model: Any, state: Tensor) -> Tensor:
        return model.model.norm(state)
