"""Pause: every token is followed by M copies of a learned pause token; the last one predicts the next token.

    x1 p p p x2 p p p ...   (all slots of a token share its position; ordinary causal attention; one pass)

Source: the Pause baseline of PonderLM-2 (arXiv 2509.23184).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megaponder.errors import ConfigError
from megaponder.ponder.base import (
    EntryTools,
    ExitTools,
    Flow,
    Method,
    Pass,
    Readout,
    depth_scaled,
    pass_count,
    register,
    slot,
    token_row,
)


@register
class Pause(Method):
    """Pause tokens inserted after every token."""

    name = "pause"
    summary = "pauses extra slots per token, filled with a learned pause token"

    @dataclass
    class Options:
        pauses: int = pass_count(3)
        """M: pause slots after every token."""
        pause_token_id: int = token_row(50288, "pause")
        """Row of the embedding table that serves as pause token (a padding row of the GPT-NeoX vocabulary)."""

        def __post_init__(self) -> None:
            if self.pauses < 1:
                raise ConfigError(
                    "ponder.options.pauses", self.pauses, "it must be at least 1", "use 1, or method vanilla"
                )
            if self.pause_token_id < 0:
                raise ConfigError(
                    "ponder.options.pause_token_id", self.pause_token_id, "it must be a token id", "use 0 or more"
                )

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        return (Pass(0, last=True, slots=self.options.pauses + 1),)

    def embedding_scale(self) -> float:
        return math.sqrt(self.shape.hidden_size)

    def initialisation(self) -> tuple[str, float]:
        return ("normal", 1.0) if self.shape.neox_recipe else depth_scaled(self.shape, 1)

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        pauses = torch.full_like(ids_bn, self.options.pause_token_id)
        expanded = torch.stack([ids_bn] + [pauses] * self.options.pauses, dim=2).flatten(1)
        return Flow(tools.embed(expanded))

    def readout(
        self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools
    ) -> Readout:
        return Readout(tools.norm(slot(rows, p.slots, self.options.pauses)))
