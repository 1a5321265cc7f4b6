"""The message between stages, one tensor: rows in their precision, riders without rounding.

Riders are FP32.  In a BF16 message each is three BF16 channels whose sum is the FP32 value exactly (3 x 8 bits of
mantissa); its gradient goes back the same way.  So a stage that reads a mask or log-weight from a message gets
exactly the bits that were sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaponder.ponder.base import Flow

PARTS = 3
"""BF16 channels of an FP32 value."""
ALIGN = 8
"""BF16 messages are padded to a multiple of this many channels, for aligned rows."""


def rider_width(riders: int, dtype: torch.dtype) -> int:
    """Channels of a message that R riders take."""
    if riders == 0 or dtype in (torch.float32, torch.float64):
        return riders
    return -(-PARTS * riders // ALIGN) * ALIGN


def _split(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    parts = []
    for _ in range(PARTS):
        parts.append(x.to(dtype))
        x = x - parts[-1].to(x.dtype)
    padding = width - PARTS * x.shape[-1]
    return torch.cat([*parts, x.new_zeros(*x.shape[:-1], padding, dtype=dtype)], dim=-1)


def _join(channels: Tensor, riders: int) -> Tensor:
    parts = channels[..., : PARTS * riders].float().unflatten(-1, (PARTS, riders))
    return parts[..., 2, :] + parts[..., 1, :] + parts[..., 0, :]  # small ones first: exact


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, riders: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        ctx.riders = riders.shape[-1]
        return _split(riders, dtype, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _join(grad, ctx.riders), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, channels: Tensor, riders: int) -> Tensor:
        ctx.dtype, ctx.width = channels.dtype, channels.shape[-1]
        return _join(channels, riders)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _split(grad, ctx.dtype, ctx.width), None


def pack(flow: Flow) -> Tensor:
    """Rows [s, b, H] and riders [s, b, R] as one message [s, b, H + width]."""
    if flow.riders is None:
        return flow.rows
    width = rider_width(flow.riders.shape[-1], flow.rows.dtype)
    if width == flow.riders.shape[-1]:
        return torch.cat([flow.rows, flow.riders.to(flow.rows.dtype)], dim=-1)
    return torch.cat([flow.rows, _Split.apply(flow.riders.float(), flow.rows.dtype, width)], dim=-1)


def unpack(message: Tensor, riders: int) -> Flow:
    """The inverse of `pack`."""
    if not riders:
        return Flow(message)
    width = rider_width(riders, message.dtype)
    rows, channels = message[..., :-width], message[..., -width:]
    return Flow(rows, channels if width == riders else _Join.apply(channels, riders))
