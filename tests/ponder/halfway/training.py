"""Halfway: two passes; a gate g decides for each token how much of the first pass's state h enters the second:
x = c We[id] + g h with g = sigmoid(w h + b), read out after the second pass; loss = CE + cost_weight * mean g."""

from dataclasses import dataclass

from torch import nn

from megaponder.ponder.base import Flow, Method, Pass, Readout, register
from megaponder.ponder.halting import linear32


@register
class Halfway(Method):
    name, summary = "halfway", "a second pass that a gate mixes in"

    @dataclass
    class Options:
        cost_weight: float = 0.1
        """Weight of the mean gate in the loss."""

    def passes(self, seed, step):
        return (Pass(0, last=False), Pass(1, last=True))

    def exit_modules(self):
        return {"gate": nn.Linear(self.shape.hidden_size, 1)}

    def enter(self, p, ids_bn, feedback, carry, tools):
        if feedback is None:
            carry["embedding"] = tools.embed(ids_bn)  # stays on the first stage until the next pass
        return Flow(carry["embedding"] + (0 if feedback is None else feedback.rows))

    def leave(self, p, rows, riders, carry, tools):
        h = tools.norm(rows)
        gate = linear32(tools.modules["gate"], h).sigmoid()
        carry["cost"] = (gate[..., 0] * tools.valid_sb).sum()  # stays on the last stage
        return Flow(gate.to(h.dtype) * h)

    def readout(self, p, rows, riders, carry, tools):
        return Readout(tools.norm(rows), aux=self.options.cost_weight * carry["cost"])

    def extra_flops(self, p, vocab_size):
        return 0.0 if p.last else 2.0 * self.shape.hidden_size
