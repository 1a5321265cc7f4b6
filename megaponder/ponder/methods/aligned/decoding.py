"""Decoding with aligned halting: what adaponderlm, pruned_ponderlm and confident_ponderlm share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Run, View
from megaponder.decoding.window import Window, window


@dataclass
class Aligned(View):
    """Inactive rows keep the keys and values of the previous pass."""

    active: Tensor | None = None
    """[b, r]; None in the first pass."""

    def join(self, entry: int, k: Tensor, v: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.active is not None:
            active = self.active[:, None, :, None]
            k, v = torch.where(active, k, before[0]), torch.where(active, v, before[1])
        return super().join(entry, k, v, before)


class AlignedDecoding(DecodingMethod):
    """A token continues while `decide` says so, and adds its weighted mixture.

    A halted token keeps its last state and, in all deeper passes, the keys and values of the pass in which it halted.
    """

    def decide(self, model: Any, index: int, h: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        """(weight of the mixture, whether a token continues), both [b, n], after pass `index`."""
        raise NotImplementedError

    @property
    def window(self) -> Window | None:
        """Passes that a budget leaves open."""
        return window(self.options["target"], self.options["steps"] + 1) if self.options.get("target") else None

    def deepest(self) -> int:
        """The most passes of a token."""
        return int(self.options["steps"]) + 1 if self.window is None else self.window.most

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net, steps = model.model, self.deepest() - 1
        x = net.embed(net.embed_tokens(ids), run.positions)
        kept: list[tuple[Tensor, ...]] = [()] * len(net.layers)
        state, active = net.norm(net.stack(x, 0, aligned(run, 0, None), kept)), run.real
        for index in range(1, steps + 1):
            weight, go_on = self.decide(model, index - 1, state, run)
            active = active & go_on
            if not model.training and not active.any():  # in training every gate must get a gradient
                for deeper in range(index, steps + 1):
                    copy(run, deeper, kept)
                break
            x = x + (active * weight).to(x.dtype)[..., None] * self.mixture(model, state, self.options["topk"])
            h = net.norm(net.stack(x, index, aligned(run, index, active), kept))
            state = torch.where(active[..., None], h, state)
        return state


def aligned(run: Run, index: int, active: Tensor | None) -> Aligned:
    """A pass in which only the active tokens [b, n] get new keys and values."""
    run.add(index)
    return Aligned(run.positions, run.mask(index), None, run.cache, active)


def copy(run: Run, index: int, kept: list[tuple[Tensor, ...]]) -> None:
    """Store keys and values of every layer, unchanged, as those of pass `index`."""
    if run.cache is not None:
        run.add(index)
        for i, (k, v) in enumerate(kept):
            run.cache.update(k, v, index * len(kept) + i)
