"""Aligned halting: PonderLM passes from which tokens drop out; the base of AdaPonderLM and of the baselines.

A halted token keeps its last state for the readout, its embedding does not change, and every layer reuses the keys and
values of the pass in which it halted (AdaPonderLM, arXiv 2603.01914).  So a halted token needs no computation at all,
and masking it in training, skipping it, and reusing its cache entries in decoding give the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaponder.ponder.base import CoreAttention, EntryTools, ExitTools, Flow, Method, Pass, Readout, repeated
from megaponder.ponder.budget import lottery
from megaponder.ponder.methods.ponderlm.training import PonderLM


class AlignedHalting(PonderLM):
    """PonderLM passes from which tokens drop out; subclasses say when, by `decide`."""

    rider_channels = 1  # 1.0: the token takes part in this pass
    keeps_kv = True
    halts = True
    skips = True
    chooses = True

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        return repeated(self.options.steps if self.window is None else self.window.most - 1)

    def longest(self, seed: int) -> tuple[Pass, ...]:
        return Method.longest(self, seed)

    def decides(self) -> bool:
        return True

    def decide(
        self, p: Pass, state: Tensor, active: Tensor, carry: dict[str, Tensor], tools: ExitTools
    ) -> tuple[Tensor | None, Tensor]:
        """(weight of the mixture that is fed back [n, b], or None for 1; tokens that continue [n, b] bool)."""
        raise NotImplementedError(f"{self.name} must say which tokens continue")

    def ended(self, p: Pass, state: Tensor, active: Tensor, carry: dict[str, Tensor], tools: ExitTools) -> None:
        """The last pass has run, for the active tokens."""

    def cost(self, carry: dict[str, Tensor], tools: ExitTools) -> Tensor | None:
        """Auxiliary loss: a sum over this rank's valid tokens."""
        return None

    def sums(self, carry: dict[str, Tensor], tools: ExitTools) -> dict[str, Tensor]:
        """What `Readout.stats` shows."""
        return {}

    def gate_values(self, carry: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The value of `Readout.gates`."""
        return []

    def scores(self, carry: dict[str, Tensor]) -> dict[int, Tensor]:
        """The value of `Readout.scores`."""
        return {}

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        if feedback is None:
            rows = tools.embed(ids_bn)
            riders = torch.ones(*rows.shape[:2], 1, device=rows.device)
        else:
            assert feedback.riders is not None
            rows, riders = carry["embedding"] + feedback.rows, feedback.riders
        carry["embedding"] = rows
        return Flow(rows, riders)

    def attend(
        self,
        p: Pass,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        riders: Tensor | None,
        kept: tuple[Tensor, ...],
        core: CoreAttention,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if kept:
            k, v = core.scatter(k, kept[0]), core.scatter(v, kept[1])
        return core(q, k, v), (k, v)

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        assert riders is not None
        active = riders[..., 0] > 0.5
        state = self._carried(p, rows, active, carry, tools)
        weight, go_on = self.decide(p, state, active, carry, tools)
        if self.at_random is not None and self.window is None:
            go_on = lottery(tools, 2 * p.index) < self.at_random[p.index]
        if self.forced is not None:
            go_on = self.forced > p.index + 1
        go_on = go_on & active
        carry["depth"] = carry["depth"] + go_on.float() if p.index else 1.0 + go_on.float()
        mixed = tools.on(go_on, lambda h: tools.mixture(h, self.options.topk), state)
        if weight is not None:
            mixed = mixed * weight.to(mixed.dtype)[..., None]
        return Flow(self.gated(mixed, tools), go_on.float()[..., None])

    def _carried(self, p: Pass, rows: Tensor, active: Tensor, carry: dict[str, Tensor], tools: ExitTools) -> Tensor:
        """The last state of each token that was computed while it was active."""
        state = tools.norm(rows)
        if p.index:
            state = torch.where(active[..., None], state, carry["state"])
        carry["state"] = state
        return state

    def readout(
        self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools
    ) -> Readout:
        assert riders is not None
        active = riders[..., 0] > 0.5
        state = self._carried(p, rows, active, carry, tools)
        self.ended(p, state, active, carry, tools)
        scores = {} if self.forced is None else self.scores(carry)
        gates, depth = self.gate_values(carry), carry["depth"]
        return Readout(state, self.cost(carry, tools), self.sums(carry, tools), depth, gates, scores)
