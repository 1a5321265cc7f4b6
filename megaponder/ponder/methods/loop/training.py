"""Loop: the stack runs R more times on its own output.

    x = c We[ids];  x = Stack(x)  (R + 1 times, no norm and no new embedding between);  logits = N(x) Wo^T

R may change from training step to step (`draw`, `grow_steps`; formulas in `megaponder/ponder/drawn.py`): an own choice.

Source: the Loop baseline of PonderLM-2 (arXiv 2509.23184); "Looped" in PonderLM (arXiv 2505.20674).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from megaponder.errors import ConfigError
from megaponder.ponder.base import (
    EntryTools,
    ExitTools,
    Flow,
    Method,
    Pass,
    depth_scaled,
    pass_count,
    register,
    repeated,
)
from megaponder.ponder.drawn import DrawnOptions


@register
class Loop(Method):
    """Weight-shared recurrence of the whole stack."""

    name = "loop"
    summary = "the stack runs extra_passes more times on its own output"

    @dataclass
    class Options(DrawnOptions):
        extra_passes: int = pass_count(3)
        """R: passes beyond the first, in evaluation and, where none are drawn, in training."""

        def __post_init__(self) -> None:
            if self.extra_passes < 1:
                raise ConfigError(
                    "ponder.options.extra_passes",
                    self.extra_passes,
                    "it must be at least 1",
                    "use 1, or method vanilla",
                )
            self.check_draw(self.extra_passes)

    def check_run(self) -> None:
        self.options.check_drawn("extra_passes")

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        return repeated(self.options.number(self.options.extra_passes, seed, step))

    def longest(self, seed: int) -> tuple[Pass, ...]:
        return repeated(self.options.most(self.options.extra_passes))

    def embedding_scale(self) -> float:
        return math.sqrt(2.5 * self.shape.hidden_size)

    def initialisation(self) -> tuple[str, float]:
        # the official GPT-NeoX file scales by passes too, the Llama file does not
        return depth_scaled(self.shape, self.options.extra_passes + 1 if self.shape.neox_recipe else 1)

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        return Flow(tools.embed(ids_bn)) if feedback is None else feedback

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        return Flow(rows)
