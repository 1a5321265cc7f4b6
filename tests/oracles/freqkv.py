"""FreqKV in float64, chunk after chunk as the paper's algorithm says it: no code of megaponder."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def cosine(n: int) -> Tensor:
    """The orthonormal DCT-II by its sum: row k holds a_k cos(pi (2 j + 1) k / 2 n)."""
    rows = []
    for k in range(n):
        scale = math.sqrt((1 if k == 0 else 2) / n)
        rows.append([scale * math.cos(math.pi * (2 * j + 1) * k / (2 * n)) for j in range(n)])
    return torch.tensor(rows, dtype=torch.float64)


def compress(x: Tensor, kept: int) -> Tensor:
    """x [n, ...] by its `kept` lowest frequencies, as many rows."""
    low = torch.einsum("kn,n...->k...", cosine(len(x))[:kept], x)
    return math.sqrt(kept / len(x)) * torch.einsum("kl,k...->l...", cosine(kept), low)


def attention(
    q: Tensor, k: Tensor, v: Tensor, capacity: int, sink: int, ratio: float, rotate: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """[n, h, d] of one text's q [n, h, d], k and v [n, g, d] before RoPE; `rotate(x, positions)`."""
    kept = int(ratio * (capacity - sink))
    hop = capacity - sink - kept
    memory: tuple[Tensor, Tensor] = (k[:0], v[:0])
    out, begin = [], 0
    while begin < len(q):
        if begin:  # full: compress before anything is appended
            memory = tuple(torch.cat([x[:sink], compress(x[sink:], kept)]) for x in memory)  # type: ignore[assignment]
        end = min(len(q), begin + (hop if begin else capacity))
        held = len(memory[0])
        keys, values = (torch.cat([x, new[begin:end]]) for x, new in zip(memory, (k, v), strict=True))
        memory = keys, values
        at = torch.arange(len(keys))
        assert len(keys) <= capacity
        turned, queries = rotate(keys, at), rotate(q[begin:end], at[held:])
        repeat = q.shape[1] // k.shape[1]
        turned, values = (x.repeat_interleave(repeat, dim=1) for x in (turned, values))
        logits = torch.einsum("ihd,jhd->hij", queries, turned) / math.sqrt(q.shape[-1])
        logits = logits.masked_fill(at > at[held:, None], -math.inf)
        out.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1), values))
        begin = end
    return torch.cat(out)
