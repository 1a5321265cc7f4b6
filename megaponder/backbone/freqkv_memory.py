"""FreqKV's compressions in training: what every block of a text remembers, one from the other.

    x_j       rows of block j: its memory m_j [F], then its own tokens [D]
    m_j+1     first s rows of m_j; M (others of x_j)          M [L, N]: see `decoding.freqkv`

All of it is linear, so nothing is kept for the backward, which runs the other way:

    to x_j    its gradient from attention, and M^T (that of the compressed rows of m_j+1)

In BF16 on a GPU, M is a sum of BF16 matrices, which together have the digits of FP32.  A product of two BF16 numbers is
exact in FP32, and there they are added up; so this is a product in FP32 at the speed of BF16.

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

PARTS = 3
"""BF16 matrices whose sum is M: 8 binary digits each."""
BY_PARTS = 8192
"""Up to so many rows they are faster than FFTs in FP32."""


@functools.cache
def parts(n: int, m: int, device: torch.device) -> Tensor:
    """The map of n rows to m as BF16 matrices, one below the other [PARTS * m, n], rows at multiples of 16 bytes."""
    rest = freqkv.matrix(n, m, torch.float64, device)
    made = torch.zeros(PARTS, m, -(-n // 8) * 8, dtype=torch.bfloat16, device=device)
    for part in made:
        part[:, :n] = rest
        rest = rest - part[:, :n].double()
    return made.flatten(0, 1)[:, :n]


def product_of_parts(x: Tensor, rows: int) -> Tensor:
    """x [n, c] in BF16 as `rows` rows: what each part makes of it, FP32 [PARTS, rows, c]."""
    matrix = parts(len(x), rows, x.device)
    out = torch.mm(matrix, x, out_dtype=torch.float32) if x.is_cuda else matrix.float() @ x.float()
    return out.view(PARTS, rows, -1)


def _transformed(x: Tensor, rows: int) -> Tensor:
    """x [n, c] as `rows` rows, in FP32 at least: summands [1 or PARTS, rows, c]."""
    if x.is_cuda and x.dtype is torch.bfloat16 and max(len(x), rows) <= BY_PARTS:
        return product_of_parts(x, rows)
    return freqkv.resample(x.to(torch.promote_types(x.dtype, torch.float32)), rows)[None]


@fused
def _put(into: Tensor, summands: Tensor) -> None:
    into.copy_(summands.flip(0).sum(0))  # the smallest first


@fused
def _add(into: Tensor, summands: Tensor) -> None:
    into.copy_(into + summands.flip(0).sum(0))


class _Remembered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: FreqKV, x: Tensor, first: Tensor | None) -> Tensor:
        ctx.f, ctx.first, s = f, first, f.sink
        rows = x.view(*x.shape[:3], -1)
        for j in range(1, len(rows)):
            before, memory = rows[j - 1], rows[j, : f.memory]
            given = memory if first is None else memory.clone()
            _put(memory[s:].flatten(1), _transformed(before[s:].flatten(1), f.kept))
            if first is not None:
                memory[:s] = before[:s]
                memory.copy_(torch.where(first[j][:, None], given, memory))
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        f, first, s = ctx.f, ctx.first, ctx.f.sink
        grad = grad.contiguous()  # then in place: nobody else reads it
        rows = grad.view(*grad.shape[:3], -1)
        for j in range(len(rows) - 1, 0, -1):
            before, memory = rows[j - 1], rows[j, : f.memory]
            if first is not None:
                to_given = torch.where(first[j][:, None], memory, 0)
                memory = memory - to_given
                rows[j, : f.memory] = to_given
                before[:s] += memory[:s]
            _add(before[s:].flatten(1), _transformed(memory[s:].flatten(1), f.span))
        return None, grad, None


def remembered(feature: FreqKV, x: Tensor, first: Tensor | None = None) -> Tensor:
    """x [B, C, b, ...], rows of all blocks, with memories made in place.

    Given are each block's own rows, the memory of the first and without `first` the sinks of all; with `first` [B, b],
    true where a block is the first of its document, the memories of those.
    """
    out: Tensor = _Remembered.apply(feature, x, first)
    return out
