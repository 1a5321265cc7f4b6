"""Decoding of Nanbeige loops."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Reading, Run
from megaponder.decoding.ranges import check, refuse
from megaponder.decoding.steps import State, Stepwise


class Nanbeige(DecodingMethod):
    """Each execution of a layer has keys and values of its own; with `share_kv`, in each loop the first one alone.
    `passes` runs so many loops of the whole stack, at most those of training."""

    name = "nanbeige"
    defaults = {"loops": 2, "norm_between": True, "middle": 0, "share_kv": False}
    training_only = ("loss_weights",)
    arguments = ("passes",)
    why_not_batched = "its middle layers run more often than the others"

    def stepwise(self) -> Stepwise | None:
        return None if self.options["middle"] else WholeLoops(self)

    def using(self, given: dict[str, Any]) -> Nanbeige:
        if (passes := given.get("passes")) is None:
            return self
        check("passes", passes)
        most = self.options["loops"]
        if self.options["middle"]:
            refuse(("passes", passes, "with middle a loop is several passes", "leave it out"))
        if passes > most:
            rule = f"it must be 1 to {most}, the passes that the model was trained with"
            refuse(("passes", passes, rule, f"use {most}"))
        made = copy.copy(self)
        made.options = {**self.options, "loops": int(passes)}
        return made

    def kv_passes(self) -> int:
        return 0 if self.options["share_kv"] else self.options["loops"] * self._repeats()

    def _repeats(self) -> int:
        """Passes of a loop: the middle layers may run more than once."""
        m = self.options["middle"]
        return (self.config.num_hidden_layers + m) // m if m else 1

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        if (whole := self.stepwise()) is not None:
            return whole.hidden(model, ids, run)
        net, o = model.model, self.options
        layers, m, repeats = len(net.layers), o["middle"], self._repeats()
        begin, end = (layers - m) // 2, (layers + m) // 2
        x = net.embed(net.words(ids), run.positions)
        if o["share_kv"]:
            return self._shared(net, x, run, begin, end, repeats)
        for index in range(o["loops"] * repeats):
            first, last = index % repeats == 0, index % repeats == repeats - 1
            part = range(0 if first else begin, layers if last else end)
            x = net.stack(x, index, run.view(index), part=part)
            if last and (o["norm_between"] or index == o["loops"] * repeats - 1):
                x = net.norm(x)
        return x

    def _shared(self, net: Any, x: Tensor, run: Run, begin: int, end: int, repeats: int) -> Tensor:
        """One entry of keys and values for each layer and loop, which the repetitions of the middle read."""
        loops = self.options["loops"]
        for loop in range(loops):
            view, kept = run.entry(loop), [()] * len(net.layers)
            x = net.stack(x, loop, view, kept, range(end))
            for _ in range(repeats - 1):
                x = net.stack(x, loop, Reading(**vars(view)), kept, range(begin, end))
            x = net.stack(x, loop, view, part=range(end, len(net.layers)))
            if self.options["norm_between"] or loop == loops - 1:
                x = net.norm(x)
        return x


class WholeLoops(Stepwise):
    """Loops of the whole stack, each a pass."""

    name = "nanbeige, loop by loop"

    def __init__(self, form: Nanbeige):
        self.config, self.options = form.config, form.options

    def trained(self) -> int:
        return int(self.options["loops"])

    def leave(self, model: Any, index: int | Tensor, h: Tensor, state: State, positions: Tensor) -> bool | Tensor:
        state["out"] = model.model.norm(h)
        state["x"] = state["out"] if self.options["norm_between"] else h
        return index + 1 < self.deepest()
