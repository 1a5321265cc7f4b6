"""Latent thoughts: the passes and rows that PonderLM-2 and PonderLM-3 share; `ponderlm2` has the formula."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megaponder.errors import ConfigError
from megaponder.ponder.base import (
    EntryTools,
    ExitTools,
    Flow,
    Method,
    Pass,
    depth_scaled,
    interleave,
    pass_count,
    slot,
)
from megaponder.ponder.halting import at_least


@dataclass
class LatentOptions:
    """Options of the methods that refine latent thoughts by Jacobi iterations."""

    latents: int = pass_count(1)
    """K: latent thoughts of a token."""
    jacobi: int = pass_count(3)
    """J: refinements in evaluation, and in training where none are drawn."""
    jacobi_from: int = pass_count(0)
    """Training draws J uniformly from jacobi_from .. jacobi_to (the papers: 2 .. 3 for Llama, 2 .. 4 for GPT-NeoX)."""
    jacobi_to: int = pass_count(0)
    """0: J is fixed in training too."""

    def __post_init__(self) -> None:
        at_least(self, "latents", 1)
        at_least(self, "jacobi", 0)
        if self.jacobi_from < 0 or self.jacobi_to < self.jacobi_from:
            raise ConfigError(
                "ponder.options.jacobi_to",
                self.jacobi_to,
                f"it must be at least jacobi_from = {self.jacobi_from}, which is at least 0",
                f"use {max(self.jacobi_from, 0)}",
            )


class LatentMethod(Method):
    """The passes and rows of PonderLM-2, which PonderLM-3 shares."""

    final_reads: tuple[int, ...] | None = None
    """Slots that the readout uses (None: all)."""

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        o = self.options
        k, j = o.latents, o.jacobi
        if step is not None and o.jacobi_to:
            j = random.Random(f"jacobi/{seed}/{step}").randint(o.jacobi_from, o.jacobi_to)
        grow = [Pass(i, False, slots=i + 1, feedback_slots=i + 1) for i in range(k)]
        refine = [Pass(k + i, False, slots=k + 1, feedback_slots=k, reads=tuple(range(k))) for i in range(j)]
        return (*grow, *refine, Pass(k + j, True, slots=k + 1, reads=self.final_reads))

    def _watch(self, p: Pass, latents: Tensor, carry: dict[str, Tensor], tools: ExitTools) -> None:
        """Record how far this refinement moved the latents: sum over valid tokens of the mean square."""
        if p.reads is not None:
            moved = (latents.detach().float() - carry["latents"].float()).square().mean(-1)
            per_token = moved.unflatten(0, (-1, p.feedback_slots)).mean(1)
            carry[f"jacobi_rmse{p.index - self.options.latents}"] = (per_token * tools.valid_sb).sum()
        carry["latents"] = latents.detach()

    @staticmethod
    def _residuals(carry: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in carry.items() if name.startswith("jacobi")}

    def stat_names(self, plan: Sequence[Pass]) -> tuple[str, ...]:
        return (*self.stats, *(f"jacobi_rmse{i}" for i in range(len(plan) - 1 - self.options.latents)))

    def towards_decoding(self, tokens: int) -> Iterator[Any]:
        """More and more refinements, up to as many as are always enough."""
        most = self.options.latents * (tokens - 1)
        refinements = min(max(self.options.jacobi, 8), most)
        yield replace(self.options, jacobi=refinements)
        while refinements < most:
            refinements = min(2 * refinements, most)
            yield replace(self.options, jacobi=refinements)

    def embedding_scale(self) -> float:
        return math.sqrt(2.5 * self.shape.hidden_size)  # times std sqrt(2/(5H)) = 1, the RMS of the states beside it

    def initialisation(self) -> tuple[str, float]:
        return depth_scaled(self.shape, self.options.latents + 1 if self.shape.neox_recipe else 1)

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        if feedback is None:
            carry["embedding"] = tools.embed(ids_bn)
            return Flow(carry["embedding"])
        latents = p.slots - 1
        return Flow(interleave([carry["embedding"], *(slot(feedback.rows, latents, i) for i in range(latents))]))
