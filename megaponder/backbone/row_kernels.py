"""Gathering and scattering rows of active tokens, and selecting between rows, with one kernel per direction.

No row is gathered twice, so a gradient is read row by row through the inverse index; a general gather's backward would
have to sum rows, in an undefined order.

Shapes: s tokens of this rank, c places for active ones, b micro-batch.  `index` [c, b]: the token at each place;
        `inverse` [s, b]: the place of each token, c where it has none; `active` [s, b].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaponder.backbone.fused import fused


def _like(index: Tensor, x: Tensor) -> Tensor:
    """[s, b] in the shape that broadcasts over x [s, b, ...]."""
    return index.reshape(*index.shape, *([1] * (x.dim() - 2)))


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [s, b, ...] by index [c, b]."""
    return x.gather(0, _like(index, x).expand(*index.shape, *x.shape[2:]))


@fused
def only(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` at active tokens, `old` elsewhere; active [s, b], new and old [s, b, ...]."""
    return torch.where(_like(active, new), new, old)


@fused
def _gather_forward(x: Tensor, index: Tensor) -> Tensor:
    return _pick(x, index)


@fused
def _gather_backward(grad: Tensor, inverse: Tensor) -> Tensor:
    c = grad.shape[0]
    return torch.where(_like(inverse < c, grad), _pick(grad, inverse.clamp(max=c - 1)), 0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        out: Tensor = _gather_forward(x, index)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather_backward(grad.contiguous(), *ctx.saved_tensors), None, None


def gather_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """The rows of x [s, b, ...] at the places: [c, b, ...]."""
    out: Tensor = _Gather.apply(x, index, inverse)
    return out


@fused
def _scatter_forward(new: Tensor, old: Tensor | None, inverse: Tensor, active: Tensor) -> Tensor:
    return torch.where(_like(active, new), _pick(new, inverse.clamp(max=new.shape[0] - 1)), 0 if old is None else old)


@fused
def _scatter_backward(grad: Tensor, index: Tensor, active: Tensor, old: bool) -> tuple[Tensor, Tensor | None]:
    wide = _like(active, grad)
    return _pick(torch.where(wide, grad, 0), index), torch.where(wide, 0, grad) if old else None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: Tensor, old: Tensor | None, index: Tensor, inverse: Tensor, active: Tensor) -> Tensor:
        ctx.save_for_backward(index, active)
        ctx.old = old is not None
        out: Tensor = _scatter_forward(new, old, inverse, active)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, active = ctx.saved_tensors
        return *_scatter_backward(grad.contiguous(), index, active, ctx.old), None, None, None


def scatter_rows(new: Tensor, old: Tensor | None, index: Tensor, inverse: Tensor, active: Tensor) -> Tensor:
    """`old` [s, b, ...] (None: zeros) with the rows of `new` [c, b, ...] where active."""
    out: Tensor = _Scatter.apply(new, old, index, inverse, active)
    return out
