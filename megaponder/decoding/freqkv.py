"""FreqKV's compression (arXiv 2505.00570): a signal over tokens is resampled to fewer by its low frequencies.

    y = sqrt(L / N) C_L^T [I_L 0] C_N x        C_n: the orthonormal DCT-II of n rows

along the sequence, each channel of keys and values by itself.  The factor keeps amplitudes: a constant stays the same
constant.  In FP32 at least, whatever the format of x.

Shapes: n rows that are given, m rows that are asked for.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from megaponder.decoding.freqkv_blocks import BY_MATRIX, FreqKV


def slots(feature: FreqKV, positions: Tensor) -> Tensor:
    """The row of the cache, and at once the position for RoPE, of tokens at these positions of their texts."""
    beyond = positions - feature.memory
    return torch.where(beyond < 0, positions, feature.memory + beyond.remainder(feature.hop))


def resample(x: Tensor, rows: int) -> Tensor:
    """x [n, ...] as m = `rows` rows; to more rows it is the transposed map, which its backward uses."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out: Tensor = _Resample.apply(wide.flatten(1), rows)
    return out.view(rows, *x.shape[1:]).to(x.dtype)


class _Resample(torch.autograd.Function):
    """Linear, so nothing is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.rows = n = len(x)
        if max(n, rows) <= BY_MATRIX:
            return matrix(n, rows, x.dtype, x.device) @ x
        return _by_fft(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Resample.apply(grad, ctx.rows), None


@functools.cache
def matrix(n: int, m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[m, n]: made in FP64, then rounded once."""
    least = min(n, m)
    made = math.sqrt(least / max(n, m)) * _cosines(m)[:least].t() @ _cosines(n)[:least]
    return made.to(dtype=dtype, device=device)


def _cosines(n: int) -> Tensor:
    """The orthonormal DCT-II [n, n], FP64."""
    place = torch.arange(n, dtype=torch.float64)
    table = math.sqrt(2 / n) * torch.cos(math.pi / n * torch.outer(place, place + 0.5))
    table[0] /= math.sqrt(2)
    return table


@functools.cache
def _turns(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """exp(-i pi k / 2n) for k = 0 .. n // 2 [n // 2 + 1, 1]: made in FP64."""
    angle = -math.pi / (2 * n) * torch.arange(n // 2 + 1, dtype=torch.float64)
    return torch.polar(torch.ones_like(angle), angle)[:, None].to(dtype=dtype.to_complex(), device=device)


@functools.cache
def _weights(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What makes a DCT-II orthonormal [n, 1]."""
    made = torch.full((n, 1), math.sqrt(2 / n), dtype=torch.float64)
    made[0] = math.sqrt(1 / n)
    return made.to(dtype=dtype, device=device)


def _dct(x: Tensor) -> Tensor:
    """Orthonormal DCT-II of x [n, c] by one real FFT of n rows: the even rows, then the odd ones backwards."""
    n = len(x)
    seen = torch.fft.rfft(torch.cat([x[0::2], x[1::2].flip(0)]), dim=0) * _turns(n, x.dtype, x.device)
    return torch.cat([seen.real, -seen.imag[1 : (n + 1) // 2].flip(0)]) * _weights(n, x.dtype, x.device)


def _inverse(x: Tensor) -> Tensor:
    """The inverse of `_dct`."""
    n = len(x)
    x = x / _weights(n, x.dtype, x.device)
    mirrored = torch.cat([torch.zeros_like(x[:1]), x[n - n // 2 :].flip(0)])
    seen = torch.complex(x[: n // 2 + 1].contiguous(), -mirrored) * _turns(n, x.dtype, x.device).conj()
    rows = torch.fft.irfft(seen, n=n, dim=0)
    out = torch.empty_like(x)
    out[0::2], out[1::2] = rows[: (n + 1) // 2], rows[(n + 1) // 2 :].flip(0)
    return out


def _by_fft(x: Tensor, rows: int) -> Tensor:
    n = len(x)
    seen = _dct(x)[:rows] if rows < n else torch.cat([_dct(x), x.new_zeros(rows - n, x.shape[1])])
    return math.sqrt(min(n, rows) / max(n, rows)) * _inverse(seen)
