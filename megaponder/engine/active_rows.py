"""Halted tokens leave the computation: active tokens' rows are gathered, computed and scattered back.

A stage knows the active tokens from the rider mask.  Every sequence of a micro-batch gets the same number of places:
the largest count rounded up to one of 16 sizes.  Spare places hold halted tokens, whose results are dropped.  So
masking and gathering give the same numbers, and only the amount of work differs.

Shapes: n tokens of the sequence, s of them on this rank, c places on this rank, b micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaponder.backbone.context import Context
from megaponder.backbone.documents import Documents
from megaponder.backbone.row_kernels import gather_rows, only, scatter_rows

SIZES = 16
"""Number of sizes of a gathered pass: few shapes for kernels and captured graphs."""


def most_active(active: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The largest number of active tokens of a sequence on any rank of the group; active [s, b]."""
    most = active.sum(0).max()
    if group is not None and group.size() > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most


def unit_of(multiple: int, b: int) -> int:
    """The unit of places for b sequences that makes the number of rows a multiple of `multiple`."""
    return multiple // math.gcd(multiple, b)


def places_for(most: Tensor | int, s: int, unit: int = 1) -> int:
    """Places for that many of s tokens, rounded up to one of about 16 sizes, all multiples of `unit` (as s is).

    If `most` is a tensor, the host waits for its device.
    """
    step = -(-max(1, s // SIZES) // unit) * unit
    return min(s, max(1, -(-int(most) // step)) * step)


class Rows:
    """The places of active tokens on this rank; `active` [s, b] bool.

    With `group` the sequence is sharded over it: all ranks get the same number of places.  `places` is their number if
    already counted; counting makes the host wait for the device.  Otherwise they are a multiple of `unit`.
    """

    def __init__(
        self, active: Tensor, group: dist.ProcessGroup | None = None, places: int | None = None, unit: int = 1
    ):
        self.places = places_for(most_active(active, group), active.shape[0], unit) if places is None else places
        # stable: active tokens first, in their order, then halted ones
        self.index = (~active).int().argsort(dim=0, stable=True)[: self.places]
        self.active = active
        self._inverse = self._places_of_rows()
        self._group = group

    def _places_of_rows(self) -> Tensor:
        """The place of each token, `places` if it has none: [s, b]."""
        number = torch.arange(self.places, device=self.index.device)[:, None].expand_as(self.index)
        return torch.full_like(self.active, self.places, dtype=torch.long).scatter(0, self.index, number)

    def gather(self, x: Tensor) -> Tensor:
        """Rows at the places: [s, b, ...] -> [c, b, ...]."""
        return gather_rows(x, self.index, self._inverse)

    def scatter(self, new: Tensor, old: Tensor | None = None) -> Tensor:
        """`old` [s, b, ...] (None: zeros) with the active tokens' rows from `new` [c, b, ...]."""
        return scatter_rows(new, old, self.index, self._inverse, self.active)

    def all_gather(self) -> Rows:
        """The places of all ranks of the group, numbered in the full sequence."""
        if self._group is None or self._group.size() == 1:
            return self
        size, rank = self._group.size(), self._group.rank()
        out = object.__new__(Rows)
        out.index, active = (
            _all_gather(x, self._group) for x in (self.index + rank * self.active.shape[0], self.active.to(torch.uint8))
        )
        out.active, out.places, out._group = active.bool(), self.places * size, None
        out._inverse = out._places_of_rows()
        return out

    @property
    def covers_all(self) -> bool:
        """Every token has a place, so gathering would save nothing."""
        return self.places == self.active.shape[0]


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


class Attending:
    """What `Method.attend` calls (ponder.base.CoreAttention): attention of this pass's rows, gathered or not.

    Gathered queries are scattered back for the attention only: a fused causal kernel over all rows is faster than any
    mask over fewer, and the wasted work is a small part of a pass (measured in benchmarks/halting.py).  Keys and values
    have a row for each token, so that ranks of one context, whose rows differ, exchange equal shapes.
    """

    def __init__(
        self,
        core: Any,
        rows: Rows | None,
        active: Tensor | None,
        layer: int,
        modules: nn.ModuleDict,
        slots: int,
        ids: Tensor,
        groups: slice,
        inputs: Callable[[int], Tensor],
        documents: Documents | None = None,
        context: Context | None = None,
    ):
        self._core, self._rows, self._active, self._slots = core, rows, active, slots
        self._documents, self._context = documents, context
        self.layer, self.modules, self.ids, self.groups, self.inputs = layer, modules, ids, groups, inputs

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None = None) -> Tensor:
        out: Tensor = self._core(self.scatter(q), k, v, key_bias, self._slots, self._documents, self._context)
        return out if self._rows is None else self._rows.gather(out)

    def merged(
        self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], alive: Sequence[Tensor | None]
    ) -> Tensor:
        """One softmax over several key sets."""
        out: Tensor = self._core.merged(self.scatter(q), keys, values, alive, self._documents, self._context)
        return out if self._rows is None else self._rows.gather(out)

    def scatter(self, new: Tensor, old: Tensor | None = None) -> Tensor:
        """Rows of all tokens: `new` at active tokens, `old` (None: anything finite) at the others."""
        if self._rows is not None:
            return self._rows.scatter(new, old)
        return new if old is None or self._active is None else only(self._active, new, old)
