"""FreqKV's compressions in training: what every block of a text remembers, one from the other.

    x_j       rows of block j: its memory m_j [F], then its own tokens [D]
    m_j+1     first s rows of m_j; M (others of x_j)          M [L, N]: see `decoding.freqkv`

All of it is linear, so nothing is kept for the backward, which runs the other way:

    to x_j    its gradient from attention, and the transposed map of what came to m_j+1

In BF16 on a GPU, the matrix is a sum of BF16 matrices.  A product of two BF16 numbers is exact in FP32, and there they
are added up: as near to FP64 as the GPU's sums are (5e-6 at 4,092 rows), where rounding the result to BF16 costs 2e-3.

Shapes: B blocks, b micro-batch, c channels of all heads; C capacity, F memory, D hop, s sink, N span, L kept.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megaponder.backbone.fused import fused
from megaponder.decoding import freqkv
from megaponder.decoding.freqkv_blocks import FreqKV

PARTS = 2
"""BF16 matrices whose sum is the map: 16 binary digits."""
BY_PARTS = 8192
"""Up to this capacity they are faster than FFTs in FP32."""


@functools.cache
def parts(f: FreqKV, forward: bool, device: torch.device) -> Tensor:
    """The map of all C rows of a block to the F rows of the next memory, or back, as BF16 matrices below each other:
    [PARTS * F', C], or [PARTS * C, F'].

    F' is a multiple of 8 with rows of zeros, where C has so many: other matrices take three times as long.
    """
    room = min(-(-f.memory // 8) * 8, f.capacity)
    rest = torch.zeros(room, f.capacity, dtype=torch.float64, device=device)
    rest[: f.sink, : f.sink] = torch.eye(f.sink)
    rest[f.sink : f.memory, f.sink :] = freqkv.matrix.__wrapped__(f.span, f.kept, torch.float64, device)  # not kept
    made = []
    for _ in range(PARTS):
        made.append(rest.bfloat16())
        rest = rest - made[-1].double()
    return torch.cat(made if forward else [part.t() for part in made])


def by_parts(f: FreqKV, x: Tensor, forward: bool) -> Tensor:
    """x in BF16, all rows of a block [C, c], or those that came to a memory [C, c], whose first F count: what each part
    makes of it, FP32 [PARTS, F' or C, c]."""
    matrix = parts(f, forward, x.device)
    x = x[: matrix.shape[1]]
    out = torch.mm(matrix, x, out_dtype=torch.float32) if x.is_cuda else matrix.float() @ x.float()
    return out.view(PARTS, -1, x.shape[1])


def _made(f: FreqKV, x: Tensor, forward: bool) -> Tensor:
    """Like `by_parts` in any format: summands [1 or PARTS, F or more, or C, c]."""
    if x.is_cuda and x.dtype is torch.bfloat16 and f.capacity <= BY_PARTS:
        return by_parts(f, x, forward)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    rest = x[f.sink :] if forward else x[f.sink : f.memory]
    return torch.cat([x[: f.sink], freqkv.resample(rest, f.kept if forward else f.span)])[None]


@fused
def _put(into: Tensor, summands: Tensor) -> None:
    into.copy_(summands.flip(0).sum(0)[: len(into)])  # the smallest first


@fused
def _add(into: Tensor, summands: Tensor) -> None:
    into.copy_(into + summands.flip(0).sum(0))


class _Remembered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: FreqKV, x: Tensor, first: Tensor | None) -> Tensor:
        ctx.f, ctx.first = f, first
        rows = x.view(*x.shape[:3], -1)
        for j in range(1, len(rows)):
            memory = rows[j, : f.memory]
            given = memory if first is None else memory.clone()
            _put(memory.flatten(1), _made(f, rows[j - 1].flatten(1), True))
            if first is not None:
                memory.copy_(torch.where(first[j][:, None], given, memory))
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        f, first = ctx.f, ctx.first
        grad = grad.contiguous()  # then in place: nobody else reads it
        rows = grad.view(*grad.shape[:3], -1)
        for j in range(len(rows) - 1, 0, -1):
            came = rows[j]
            if first is not None:
                begins = first[j][:, None]
                came = torch.where(begins, 0, came)
                rows[j, : f.memory] = torch.where(begins, rows[j, : f.memory], 0)
            _add(rows[j - 1].flatten(1), _made(f, came.flatten(1), False))
        return None, grad, None


def remembered(feature: FreqKV, x: Tensor, first: Tensor | None = None) -> Tensor:
    """x [B, C, b, ...], rows of all blocks, with memories made in place.

    Given are each block's own rows and the memory of the first block; with `first` [B, b], true where a block is the
    first of its document, the memories of those.
    """
    out: Tensor = _Remembered.apply(feature, x, first)
    return out
