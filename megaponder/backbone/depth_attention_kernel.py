"""Depth-Attention's mix as one Triton kernel forward and one backward, for the mean of a group's queries.

The sources are read where they lie: their addresses are written to a table by a kernel too, which a CUDA graph captures
like any other.  Forward, a softmax over layers is made online, as attention kernels do over keys; it keeps its log-sum.

Gradients of a source come from every later layer.  Instead of a tensor from each, which would have to be added, a layer
hands its sources on and so gets back the gradient of all later layers, to which its kernel adds its own share in place.

Shapes: R = s * b * g rows, r query heads a row, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 8
"""Addresses that one launch writes."""
TILE = 2048
"""Elements of a program's tile of rows."""


@triton.jit(do_not_specialize=["fresh"])
def _write(table, fresh, t0, t1, t2, t3, t4, t5, t6, t7):  # type: ignore[no-untyped-def]
    """Addresses of eight tensors; bit i of `fresh` is put into the lowest bit of address i, which is free."""
    tl.store(table, t0.to(tl.int64) + (fresh & 1))
    tl.store(table + 1, t1.to(tl.int64) + ((fresh >> 1) & 1))
    tl.store(table + 2, t2.to(tl.int64) + ((fresh >> 2) & 1))
    tl.store(table + 3, t3.to(tl.int64) + ((fresh >> 3) & 1))
    tl.store(table + 4, t4.to(tl.int64) + ((fresh >> 4) & 1))
    tl.store(table + 5, t5.to(tl.int64) + ((fresh >> 5) & 1))
    tl.store(table + 6, t6.to(tl.int64) + ((fresh >> 6) & 1))
    tl.store(table + 7, t7.to(tl.int64) + ((fresh >> 7) & 1))


def _addresses(tensors: Sequence[Tensor], fresh: Sequence[bool] = ()) -> Tensor:
    """Their addresses [n], int64, on their device; marked where `fresh` says that what lies there is not read."""
    room = -(-len(tensors) // AT_ONCE) * AT_ONCE
    table = torch.empty(room, dtype=torch.int64, device=tensors[0].device)
    for begin in range(0, len(tensors), AT_ONCE):
        some, marks = list(tensors[begin : begin + AT_ONCE]), fresh[begin : begin + AT_ONCE]
        bits = sum(1 << i for i, mark in enumerate(marks) if mark)
        filled = some + some[:1] * (AT_ONCE - len(some))
        _write[(1,)](table[begin:], bits, *filled)
    return table


@triton.jit
def _mean_query(q, rows, inside, channels, exist, each: tl.constexpr, size: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([rows.shape[0], channels.shape[0]], wide)
    for i in tl.static_range(each):
        at = (rows[:, None] * each + i) * size + channels[None, :]
        total += tl.load(q + at, inside[:, None] & exist[None, :], 0.0).to(wide)
    return total / each


@triton.jit(do_not_specialize=["count"])
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, sources, out, log_sum, count, scale, rows_in_all,
    each: tl.constexpr, size: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, competes: tl.constexpr,
    wide: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    channels = tl.arange(0, width)
    inside, exist = rows < rows_in_all, channels < size
    mask, at = inside[:, None] & exist[None, :], rows[:, None] * size + channels[None, :]
    query = _mean_query(q, rows, inside, channels, exist, each, size, wide)
    if competes:
        highest = tl.sum(query * tl.load(k + at, mask, 0.0).to(wide), 1) * scale
        total = tl.full([tile], 1.0, wide)
        mixed = tl.load(v + at, mask, 0.0).to(wide)
    else:
        highest = tl.full([tile], float("-inf"), wide)
        total = tl.zeros([tile], wide)
        mixed = tl.zeros([tile, width], wide)
    for j in range(count):
        key = tl.multiple_of(tl.load(sources + 2 * j).to(tl.pointer_type(out.dtype.element_ty)), 16)
        value = tl.multiple_of(tl.load(sources + 2 * j + 1).to(tl.pointer_type(out.dtype.element_ty)), 16)
        score = tl.sum(query * tl.load(key + at, mask, 0.0).to(wide), 1) * scale
        new = tl.maximum(highest, score)
        kept, share = tl.exp(highest - new), tl.exp(score - new)
        total = total * kept + share
        mixed = mixed * kept[:, None] + share[:, None] * tl.load(value + at, mask, 0.0).to(wide)
        highest = new
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask)
    tl.store(log_sum + rows, highest + tl.log(total), inside)


@triton.jit(do_not_specialize=["count"])
def _backward(  # type: ignore[no-untyped-def]
    q, k, v, out, log_sum, grad, sources, grads, to_q, to_k, to_v, count, scale, rows_in_all,
    each: tl.constexpr, size: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, competes: tl.constexpr,
    wide: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    channels = tl.arange(0, width)
    inside, exist = rows < rows_in_all, channels < size
    mask, at = inside[:, None] & exist[None, :], rows[:, None] * size + channels[None, :]
    query = _mean_query(q, rows, inside, channels, exist, each, size, wide)
    coming = tl.load(grad + at, mask, 0.0).to(wide)
    lse = tl.load(log_sum + rows, inside, 0.0)
    mean = tl.sum(coming * tl.load(out + at, mask, 0.0).to(wide), 1)  # of the shares' gradients, weighed by the shares
    to_query = tl.zeros([tile, width], wide)
    if competes:
        own = tl.load(k + at, mask, 0.0).to(wide)
        share = tl.exp(tl.sum(query * own, 1) * scale - lse)
        to_score = scale * share * (tl.sum(coming * tl.load(v + at, mask, 0.0).to(wide), 1) - mean)
        to_query += to_score[:, None] * own
        tl.store(to_k + at, (to_score[:, None] * query).to(to_k.dtype.element_ty), mask)
        tl.store(to_v + at, (share[:, None] * coming).to(to_v.dtype.element_ty), mask)
    for j in range(count):
        key = tl.multiple_of(tl.load(sources + 2 * j).to(tl.pointer_type(out.dtype.element_ty)), 16)
        value = tl.multiple_of(tl.load(sources + 2 * j + 1).to(tl.pointer_type(out.dtype.element_ty)), 16)
        one, two = tl.load(grads + 2 * j), tl.load(grads + 2 * j + 1)
        to_key = tl.multiple_of((one & -2).to(tl.pointer_type(out.dtype.element_ty)), 16)
        to_value = tl.multiple_of((two & -2).to(tl.pointer_type(out.dtype.element_ty)), 16)
        from_key = tl.where((one & 1) == 0, tl.load(to_key + at, mask, 0.0).to(wide), 0.0)
        from_value = tl.where((two & 1) == 0, tl.load(to_value + at, mask, 0.0).to(wide), 0.0)
        there = tl.load(key + at, mask, 0.0).to(wide)
        share = tl.exp(tl.sum(query * there, 1) * scale - lse)
        to_score = scale * share * (tl.sum(coming * tl.load(value + at, mask, 0.0).to(wide), 1) - mean)
        to_query += to_score[:, None] * there
        tl.store(to_key + at, (from_key + to_score[:, None] * query).to(out.dtype.element_ty), mask)
        tl.store(to_value + at, (from_value + share[:, None] * coming).to(out.dtype.element_ty), mask)
    for i in tl.static_range(each):
        place = (rows[:, None] * each + i) * size + channels[None, :]
        tl.store(to_q + place, (to_query / each).to(to_q.dtype.element_ty), mask)


def _shape(q: Tensor, k: Tensor) -> dict[str, Any]:
    """What the kernels are compiled for."""
    d = q.shape[-1]
    width = triton.next_power_of_2(d)
    wide = tl.float64 if k.dtype is torch.float64 else tl.float32
    return {
        "each": q.shape[2] // k.shape[2], "size": d, "width": width, "tile": max(1, TILE // width), "wide": wide,
    }  # fmt: skip


class _Fused(torch.autograd.Function):
    """The mix, and the sources once more."""

    @staticmethod
    def forward(
        ctx: Any, scale: float, competes: bool, q: Tensor, k: Tensor, v: Tensor, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        given, rows = _shape(q, k), k.numel() // k.shape[-1]
        out = torch.empty_like(v)
        log_sum = torch.empty(rows, dtype=torch.promote_types(v.dtype, torch.float32), device=v.device)
        grid = (triton.cdiv(rows, given["tile"]),)
        count = len(sources) // 2
        _forward[grid](q, k, v, _addresses(sources), out, log_sum, count, scale, rows, competes=competes, **given)
        ctx.save_for_backward(q, k, v, out, log_sum, *sources)
        ctx.scale, ctx.competes = scale, competes
        ctx.set_materialize_grads(False)
        return out, *(x.view_as(x) for x in sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *left: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, *sources = ctx.saved_tensors
        given, rows = _shape(q, k), k.numel() // k.shape[-1]
        fresh = [x is None for x in left]
        # contiguous(): a gradient with other strides is copied; nobody else reads one that is not
        grads = [torch.empty_like(s) if g is None else g.contiguous() for s, g in zip(sources, left, strict=True)]
        to_q = torch.empty_like(q)
        to_k, to_v = (torch.empty_like(x) if ctx.competes else None for x in (k, v))
        grid = (triton.cdiv(rows, given["tile"]),)
        _backward[grid](
            q, k, v, out, log_sum, grad.contiguous(), _addresses(sources), _addresses(grads, fresh), to_q,
            q if to_k is None else to_k, q if to_v is None else to_v, len(sources) // 2, ctx.scale, rows,
            competes=ctx.competes, **given,
        )  # fmt: skip
        return None, None, to_q, to_k, to_v, *grads


def mix(scale: float, competes: bool, q: Tensor, k: Tensor, v: Tensor, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The mix [s, b, g, d], and the sources that later layers must read instead of these.

    All tensors are contiguous.  `competes`: the layer's own k and v are in the softmax.
    """
    out: tuple[Tensor, ...] = _Fused.apply(scale, competes, q, k, v, *sources)
    return out
