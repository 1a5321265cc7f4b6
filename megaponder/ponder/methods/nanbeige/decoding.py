"""Decoding of Nanbeige loops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Run


class Nanbeige(DecodingMethod):
    """Each execution of a layer has keys and values of its own."""

    name = "nanbeige"
    defaults = {"loops": 2, "norm_between": True, "middle": 0}
    training_only = ("loss_weights",)

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net, o = model.model, self.options
        layers, m = len(net.layers), o["middle"]
        begin, end, repeats = (layers - m) // 2, (layers + m) // 2, (layers + m) // m if m else 1
        x = net.embed(net.words(ids), run.positions)
        for index in range(o["loops"] * repeats):
            first, last = index % repeats == 0, index % repeats == repeats - 1
            part = range(0 if first else begin, layers if last else end) if m else None
            x = net.stack(x, index, run.view(index), part=part)
            if last and (o["norm_between"] or index == o["loops"] * repeats - 1):
                x = net.norm(x)
        return x
