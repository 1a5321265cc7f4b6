"""What the adaptive methods share: gates in FP32, ramps, bottom-k selection, and aligned halting.

Aligned halting (AdaPonderLM, arXiv 2603.01914; spec 7.4): a halted token keeps its last state for the readout, its
embedding stays as it is, and every layer reuses the keys and values of the pass in which it halted.  So a halted token
needs no computation at all, and masking it in training, gathering it away, and aliasing its cache in decoding are the
same numbers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaponder.errors import ConfigError
from megaponder.ponder.base import CoreAttention, EntryTools, ExitTools, Flow, Method, Pass, Readout


def linear32(module: nn.Module, x: Tensor) -> Tensor:
    """A Linear in FP32, whatever the precision of the model: decisions must not hang on rounding."""
    assert isinstance(module, nn.Linear)
    return F.linear(x.float(), module.weight.float(), None if module.bias is None else module.bias.float())


def ramp(step: int | None, start: int, end: int) -> float:
    """0 before `start`, 1 from `end` on, linear between; 1 in evaluation."""
    if step is None or step >= end:
        return 1.0
    return max(0.0, (step - start) / (end - start))


def smallest(values: Tensor, mask: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The smallest ceil(share * count) masked values of each sequence.

    values, mask [passes, n, b]; returns (selection [passes, n, b], selected per sequence [b]).  Equal values are taken
    in the order of pass and token, so that the selection is a function of the values alone.
    """
    passes, n, b = values.shape
    flat = torch.where(mask, values, torch.full_like(values, math.inf)).reshape(passes * n, b)
    count = torch.ceil(share * mask.reshape(passes * n, b).sum(0).double()).long()
    order = flat.argsort(dim=0, stable=True)
    rank = torch.empty_like(order).scatter_(
        0, order, torch.arange(passes * n, device=order.device)[:, None].expand(-1, b)
    )
    return (rank < count).view(passes, n, b) & mask, count


def at_least(options: object, name: str, least: float) -> None:
    """Refuse an option below its least value."""
    value = getattr(options, name)
    if value < least:
        raise ConfigError(f"ponder.options.{name}", value, f"it must be at least {least}", f"use {least}")


def fraction(options: object, name: str) -> None:
    """Refuse an option outside 0 to 1."""
    value = getattr(options, name)
    if not 0 <= value <= 1:
        raise ConfigError(
            f"ponder.options.{name}", value, "it must lie between 0 and 1", f"use {min(max(value, 0), 1)}"
        )


def ordered(options: object, start: str, end: str) -> None:
    """Refuse a ramp that ends before it starts."""
    a, b = getattr(options, start), getattr(options, end)
    if a < 0 or b < a:
        raise ConfigError(
            f"ponder.options.{end}", b, f"it must be at least {start} = {a}, which is at least 0", f"use {max(a, 0)}"
        )


class AlignedHalting(Method):
    """PonderLM passes from which tokens drop out; subclasses say when, by `decide`."""

    rider_channels = 1  # 1.0: the token takes part in this pass
    mixes_vocabulary = True
    keeps_kv = True
    halts = True
    skips = True

    def decide(
        self, p: Pass, state: Tensor, active: Tensor, carry: dict[str, Tensor], tools: ExitTools
    ) -> tuple[Tensor | None, Tensor]:
        """(weight of the mixture that is fed back [n, b], or None for 1; tokens that go on [n, b] bool)."""
        raise NotImplementedError

    def cost(self, carry: dict[str, Tensor], tools: ExitTools) -> Tensor | None:
        """Auxiliary loss: a sum over this rank's valid tokens."""
        return None

    def gate_values(self, carry: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What `Readout.gates` shows."""
        return []

    def _steps(self) -> int:
        return int(self.options.steps)

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        s = self._steps()
        return tuple(Pass(i, last=i == s) for i in range(s + 1))

    def embedding_scale(self) -> float:
        return math.sqrt(self.shape.hidden_size)

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

    def active(self, p: Pass, riders: Tensor | None) -> Tensor | None:
        return None if p.index == 0 or riders is None else riders[..., 0] > 0.5

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
            k, v = core.place(k, kept[0]), core.place(v, kept[1])
        return core(q, k, v), (k, v)

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        assert riders is not None
        active = riders[..., 0] > 0.5
        state = self._carried(p, rows, active, carry, tools)
        weight, go_on = self.decide(p, state, active, carry, tools)
        go_on = go_on & active
        carry["depth"] = carry["depth"] + go_on.float() if p.index else 1.0 + go_on.float()
        mixed = tools.on(go_on, lambda h: tools.mixture(h, getattr(self.options, "topk", 0)), state)
        if weight is not None:
            mixed = mixed * weight.to(mixed.dtype)[..., None]
        return Flow(mixed, go_on.float()[..., None])

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
        state = self._carried(p, rows, riders[..., 0] > 0.5, carry, tools)
        return Readout(state, self.cost(carry, tools), depth=carry["depth"], gates=self.gate_values(carry))

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        if p.last:
            return 0.0
        h = self.shape.hidden_size
        return 2.0 * vocab_size * h + 2.0 * (getattr(self.options, "topk", 0) or vocab_size) * h
