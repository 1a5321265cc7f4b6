"""Linear layers in FP8 for decoding on GPUs of compute capability 8.9 or later: weights scaled by output channel, once,
and rows by themselves, each time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.backbone import feature
from megaponder.errors import UserError

LARGEST = 448.0
"""Of float8_e4m3fn."""


class Linear8(nn.Module):
    """x W^T + b of a Linear, in FP8."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.detach().float().abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
        self.register_buffer("weight", (linear.weight.detach() / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale.T.contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        scale = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
        small = (rows / scale).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(small, self.weight.T, scale, self.scale, out_dtype=x.dtype, use_fast_accum=True)
        return (out if self.bias is None else out + self.bias).unflatten(0, x.shape[:-1])


def quantise(model: Any) -> None:
    """Turn the linear layers of a model's stack into FP8; embedding, head, norms and gates stay as they are."""
    if feature(model.config, "moe"):
        raise UserError("experts cannot be turned into FP8: it was never tried; leave the model in its own format.")
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Linear8(child))
