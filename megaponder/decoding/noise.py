"""Random numbers that belong to a token: functions of seed, step, position and id, so that no layout, resume or cache
changes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MIX = (-4658895280553007687, -7723592293110705685)  # SplitMix64's multipliers, as signed numbers
_GOLDEN = -7046029254386353131


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: every bit of the result depends on every bit of x (int64, wrapping)."""
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return x ^ ((x >> 31) & (2**33 - 1))


def sequence_uniform(ids: Tensor, seed: int, step: Tensor | int, starts: Tensor | None = None) -> Tensor:
    """A number in (0, 1) for each sequence of ids [b, n], FP32 [b]; with `starts` (`data.batch.MicroBatch.starts_bn`)
    for the document of each token, as if it were a sequence of its own, FP32 [b, n]."""
    places = torch.arange(ids.shape[1], device=ids.device)
    token = _mixed(ids.long() + _mixed(torch.full_like(ids, seed))) + (places if starts is None else places - starts)
    each = _mixed(token)
    whole = each.sum(-1) if starts is None else document_sums(each, starts)
    bits = (_mixed(_mixed(whole) + step) >> 41) & (2**23 - 1)
    return (bits.float() + 0.5) / 2**23


def document_sums(x: Tensor, starts: Tensor) -> Tensor:
    """Sums of x [b, n] over the document of each token: [b, n]."""
    return torch.zeros_like(x).scatter_add(1, starts, x).gather(1, starts)


def token_noise(ids: Tensor, positions: Tensor, seed: int, step: Tensor | int, width: int) -> Tensor:
    """Standard normal numbers cut off at three standard deviations, FP32 [..., width], for tokens [...]."""
    row = _mixed(_mixed(_mixed(ids.long() + _mixed(torch.full_like(ids, seed))) + positions) + step)
    channel = torch.arange(1, width + 1, device=ids.device) * _GOLDEN
    bits = (_mixed(row[..., None] + channel) >> 40) & (2**24 - 1)
    u = (bits.float() + 0.5) / 2**24
    return torch.erfinv((2 * u - 1) * math.erf(3 / math.sqrt(2))) * math.sqrt(2)
