"""The worked example of CONTRIBUTING.md: a method in one file, through the public interface only.

Halfway: two passes; a gate decides for each token how much of the first pass's state enters the second.

    g = sigmoid(w h_0 + b);   x_1 = c We[id] + g h_0;   logits = N(Stack(x_1)) Wo^T;   loss = CE + weight * mean g
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megaponder.ponder.base import EntryTools, ExitTools, Flow, Method, Pass, Readout, register
from megaponder.ponder.halting import at_least, linear32


@register
class Halfway(Method):
    """A gated second pass."""

    name = "halfway"
    summary = "a second pass that a gate mixes in"

    @dataclass
    class Options:
        cost_weight: float = 0.1
        """Weight of the mean gate in the loss."""

        def __post_init__(self) -> None:
            at_least(self, "cost_weight", 0)

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        return (Pass(0, last=False), Pass(1, last=True))

    def exit_modules(self) -> dict[str, nn.Module]:
        return {"gate": nn.Linear(self.shape.hidden_size, 1)}

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        if feedback is None:
            carry["embedding"] = tools.embed(ids_bn)  # stays on the first stage until the next pass
            return Flow(carry["embedding"])
        return Flow(carry["embedding"] + feedback.rows)

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        h = tools.norm(rows)
        gate = linear32(tools.modules["gate"], h).sigmoid()
        carry["cost"] = (gate[..., 0] * tools.valid_sb).sum()  # stays on the last stage
        return Flow(gate.to(h.dtype) * h)

    def readout(
        self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools
    ) -> Readout:
        return Readout(tools.norm(rows), aux=self.options.cost_weight * carry["cost"])

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        return 0.0 if p.last else 2.0 * self.shape.hidden_size
