"""Prompts of a depth-wise batch: their tokens run pass after pass, in chunks, alone or beside the rows of a step.

A step of a few rows costs nearly as much as one of twice as many, since both read all weights.  So where steps are not
captured, prompts ride along with them; the pass that they are in need not be that of any other row.

Shapes: n rows of a step, m rows of prompts, r rows of either.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megaponder.decoding.passes import View
from megaponder.decoding.slots import Slots
from megaponder.decoding.steps import Front, State, Stepwise


@dataclass
class Beside(View):
    """Rows that read through several views, one after the other."""

    attends: ClassVar[bool] = True
    parts: list[tuple[int, View]]
    """(rows, what they read)."""

    def attend(self, module: Any, entry: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        counts = [rows for rows, _ in self.parts]
        pieces = zip(self.parts, *(x.split(counts, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([module.read(view, entry, *piece)[0] for (_, view), *piece in pieces], dim=2)


class Prompts:
    """Texts [row -> tokens] on their way into the slots; `depth` [B, T] is told the passes of each token."""

    def __init__(
        self, model: Any, method: Stepwise, slots: Slots, texts: dict[int, list[int]], chunk: int, depth: Tensor
    ):
        self.model, self.method, self.slots, self.depth, self.rows = model, method, slots, depth, list(texts)
        self.passes = 0
        """Rows that have run."""
        cells = [(row, i, word) for row, text in texts.items() for i, word in enumerate(text)]
        self._chunks = deque(torch.tensor(cells, device=depth.device).split(chunk) if cells else ())
        self.front: Front | None = None
        """The chunk that is running; None: all have."""
        self.proceed()

    def sift(self, go_on: Tensor, state: State) -> None:
        """Take in what a step made of the rows that ran beside its own."""
        assert self.front is not None
        self.front.sift(go_on, state)
        self.proceed()

    def proceed(self) -> None:
        """Start the next chunk where one has ended."""
        if self.front is not None and not self.front.ended:
            return
        if self.front is not None:
            self.depth[self.front.seq, self.front.token] = self.front.depth
            self.passes += int(self.front.depth.sum())
        self.front = None
        if self._chunks:
            seq, token, ids = self._chunks.popleft().T
            self.front = Front(self.method, self.model, ids, token, seq, token, self.slots)

    def view(self) -> View:
        """What the running chunk reads in its next pass."""
        assert self.front is not None
        seen: View = self.model.model.seen(self.front.view(), self.front.state["x"].dtype)
        return seen

    def run(self) -> None:
        """All that is left, alone."""
        while (front := self.front) is not None:
            front.advance(self.model.model.stack(front.state["x"][None], front.index, front.view())[0])
            self.proceed()
