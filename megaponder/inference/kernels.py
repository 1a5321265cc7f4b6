"""Triton kernels for decoding on GPUs: a matrix times one row, and attention of one row of each text by slots.

One text reads all weights for one row, so a layer takes as long as reading its weights, plus what each kernel costs to
start and to end.  So there are five of them: norm, queries, keys and values; rotary embedding, cache and attention;
output and residual; norm and gated MLP; its output and residual.  Each begins to read its weights before the kernel
before it has ended (programmatic dependent launch), and the row only after that.

Shapes: n rows (one of each text), N outputs, K inputs, k keys, d head size.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PART = 256
"""Keys that one program of attention reads; further programs read the others."""
TILES: dict[tuple[int, int], tuple[int, int, int]] = {}
"""By (N, K): outputs and inputs that a program reads at once, and its warps; for shapes whose best tile is known."""


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel can start before the one before it has ended: from compute capability 9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def tile(outputs: int, inputs: int) -> tuple[int, int, int]:
    """The tile of a matrix, by its size: what was best of seven on an H200 (benchmarks/results/one-row-cuda.md)."""
    if (found := TILES.get((outputs, inputs))) is not None:
        return found
    block, warps = (1024, 4) if outputs * inputs < 1 << 24 else (2048, 8)
    return 2, min(block, triton.next_power_of_2(inputs)), warps


@triton.jit
def product_kernel(
    x, gain, w, scale, rest, out, N, eps, K: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    SCALED: tl.constexpr, EARLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    there = (n < N)[:, None]
    at = w + n[:, None].to(tl.int64) * K + k[None, :]
    first = tl.load(at, mask=there & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    second = first
    if GATED:
        second = tl.load(
            at + N.to(tl.int64) * K, mask=there & (k < K)[None, :], other=0.0, eviction_policy="evict_first"
        )
    if EARLY:
        gdc_wait()
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sums2 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for begin in range(0, K, BLOCK_K):
        y = tl.load(x + begin + k, mask=begin + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += y * y
            y *= tl.load(gain + begin + k, mask=begin + k < K, other=0.0).to(tl.float32)
        follows = there & (begin + BLOCK_K + k < K)[None, :]  # the next tile is on its way while this one is used
        next = tl.load(at + begin + BLOCK_K, mask=follows, other=0.0, eviction_policy="evict_first")
        sums += first.to(tl.float32) * y[None, :]
        first = next
        if GATED:
            at2 = at + N.to(tl.int64) * K + begin + BLOCK_K
            next = tl.load(at2, mask=follows, other=0.0, eviction_policy="evict_first")
            sums2 += second.to(tl.float32) * y[None, :]
            second = next
    total = tl.sum(sums, 1)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if SCALED:
        total *= tl.load(scale + n, mask=n < N, other=0.0)
    total *= factor
    if GATED:
        up = tl.sum(sums2, 1) * factor
        if SCALED:
            up *= tl.load(scale + N + n, mask=n < N, other=0.0)
        total = total / (1.0 + tl.exp(-total)) * up
    if ADD:
        total += tl.load(rest + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


def product(
    x: Tensor, w: Tensor, scale: Tensor | None = None, *, gain: Tensor | None = None, eps: float = 0.0,
    rest: Tensor | None = None, gated: bool = False, early: bool = True,
) -> Tensor:  # fmt: skip
    """W f(x) [N] of x [K] and W [N, K], which may be FP8 with `scale` [N].

    gain: f is RMSNorm with this weight [K].  gated: W is [2 N, K], and the result silu(W1 f(x)) * W2 f(x).
    rest: is added, [N].  early: the weights are read while the kernel before still runs.
    """
    inputs, early = w.shape[1], early and overlaps(x.device)
    outputs = len(w) // 2 if gated else len(w)
    out = x.new_empty(outputs)
    block_n, block_k, warps = tile(outputs, inputs)
    more: dict[str, Any] = {"launch_pdl": True} if early else {}
    product_kernel[(triton.cdiv(outputs, block_n),)](
        x, x if gain is None else gain, w, x if scale is None else scale, x if rest is None else rest, out, outputs,
        eps, K=inputs, GATED=gated, NORM=gain is not None, ADD=rest is not None, SCALED=scale is not None, EARLY=early,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, **more,
    )  # fmt: skip
    return out


@triton.jit
def attention_kernel(
    q, k, v, cos, sin, keys, values, slot, found, mask, out, sums, q_row, q_head, k_row, k_head, v_row, v_head,
    turn_row, count, scale, D: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, ADJACENT: tl.constexpr,
    SHARED: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, parts, group = tl.num_programs(1), tl.num_programs(2), head // SHARED
    groups = heads // SHARED
    d = tl.arange(0, WIDTH)
    real = d < D
    place = tl.load(slot + row)
    j = part * PART + tl.arange(0, BLOCK)
    where = tl.load(found + row * count + j, mask=j < count, other=0)
    reads = (j < count) & (tl.load(mask + row * count + j, mask=j < count, other=0) != 0) & (where != place)
    at = (groups * where + group)[:, None] * D + d[None, :]
    key = tl.load(keys + at, mask=reads[:, None] & real[None, :], other=0.0)
    value = tl.load(values + at, mask=reads[:, None] & real[None, :], other=0.0)
    if EARLY:
        gdc_wait()
    q_at, k_at = q + row * q_row + head * q_head, k + row * k_row + group * k_head
    query = tl.load(q_at + d, mask=real, other=0.0).to(tl.float32)
    own = tl.load(k_at + d, mask=real, other=0.0).to(tl.float32)
    new_value = tl.load(v + row * v_row + group * v_head + d, mask=real, other=0.0)
    if TURNED > 0:
        turned = d < TURNED
        other = d ^ 1 if ADJACENT else tl.where(d < TURNED // 2, d + TURNED // 2, d - TURNED // 2)
        c = tl.load(cos + row * turn_row + d, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + row * turn_row + d, mask=turned, other=0.0).to(tl.float32)
        query = query * c + tl.load(q_at + other, mask=turned, other=0.0).to(tl.float32) * s
        own = own * c + tl.load(k_at + other, mask=turned, other=0.0).to(tl.float32) * s
    kind = keys.dtype.element_ty
    query, new_key = query.to(kind).to(tl.float32), own.to(kind)
    first = part == 0
    base = (groups * place + group) * D + d
    tl.store(keys + base, new_key, mask=real & first & (head % SHARED == 0))
    tl.store(values + base, new_value, mask=real & first & (head % SHARED == 0))
    # the first part begins with the row's own key, which may not be stored yet; parts without keys weigh nothing
    most = tl.where(first, tl.sum(query * new_key.to(tl.float32), 0) * scale, -1e30)
    total = tl.where(first, 1.0, 0.0)
    mean = tl.where(first, new_value.to(tl.float32), 0.0)
    for begin in tl.static_range(0, PART, BLOCK):
        score = tl.where(reads, tl.sum(key.to(tl.float32) * query[None, :], 1) * scale, float("-inf"))
        larger = tl.maximum(most, tl.max(score, 0))
        share, before = tl.exp(score - larger), tl.exp(most - larger)
        mean = mean * before + tl.sum(share[:, None] * value.to(tl.float32), 0)
        total, most = total * before + tl.sum(share, 0), larger
        if begin + BLOCK < PART:
            j += BLOCK
            where = tl.load(found + row * count + j, mask=j < count, other=0)
            reads = (j < count) & (tl.load(mask + row * count + j, mask=j < count, other=0) != 0) & (where != place)
            at = (groups * where + group)[:, None] * D + d[None, :]
            key = tl.load(keys + at, mask=reads[:, None] & real[None, :], other=0.0)
            value = tl.load(values + at, mask=reads[:, None] & real[None, :], other=0.0)
    if WHOLE:
        tl.store(out + (row * heads + head) * D + d, (mean / total).to(kind), mask=real)
    else:
        line = sums + ((row * heads + head) * parts + part) * (WIDTH + 2)
        tl.store(line + d, mean)
        tl.store(line + WIDTH, total)
        tl.store(line + WIDTH + 1, most)


@triton.jit
def joining_kernel(sums, out, parts, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    p, d = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    line = sums + (tl.program_id(0) * parts + p) * (WIDTH + 2)
    most = tl.load(line + WIDTH + 1, mask=p < parts, other=-1e30)
    weight = tl.exp(most - tl.max(most, 0))
    total = tl.sum(weight * tl.load(line + WIDTH, mask=p < parts, other=0.0), 0)
    mean = tl.load(line[:, None] + d[None, :], mask=(p < parts)[:, None], other=0.0)
    mean = tl.sum(weight[:, None] * mean, 0) / total
    tl.store(out + tl.program_id(0) * D + d, mean.to(out.dtype.element_ty), mask=d < D)


def attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot: Tensor, found: Tensor, mask: Tensor,
    tables: tuple[Tensor, Tensor] | None = None, adjacent: bool = False, early: bool = False,
) -> Tensor:  # fmt: skip
    """[n, heads, d] of queries [n, heads, d] over slots found [n, k] of keys, values [slots, groups, d], as far as
    mask [n, k] says.  k, v [n, groups, d] are stored in `slot` [n], which each row reads in any case.

    tables: cosines and signed sines [n, turned] of `rotary_tables`, by which q and k are turned; None: they are.
    early: all but q, k and v is read while the kernel before still runs; it must have been written before that began.
    """
    (n, heads, size), early = q.shape, early and overlaps(q.device)
    count, width = found.shape[1], triton.next_power_of_2(size)
    parts = triton.cdiv(count, PART)
    out = q.new_empty(n, heads, size)
    sums = out if parts == 1 else q.new_empty(n, heads, parts, width + 2, dtype=torch.float32)
    cos, sin = (q, q) if tables is None else tables
    more: dict[str, Any] = {"launch_pdl": True} if early else {}
    attention_kernel[(n, heads, parts)](
        q, k, v, cos, sin, keys, values, slot, found, mask, out, sums, q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), cos.stride(0), count, size**-0.5, D=size, WIDTH=width,
        TURNED=0 if tables is None else cos.shape[1], ADJACENT=adjacent, SHARED=heads // k.shape[1], PART=PART,
        BLOCK=min(PART, 16384 // width), WHOLE=parts == 1, EARLY=early, num_warps=8, **more,
    )  # fmt: skip
    if parts > 1:
        joining_kernel[(n * heads,)](
            sums, out, parts, D=size, WIDTH=width, PARTS=triton.next_power_of_2(parts), EARLY=early, num_warps=4, **more
        )
    return out
