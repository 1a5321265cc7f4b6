"""LayerNorm and RMSNorm that work under sequence parallelism (megatron-core's torch norms do not support it)."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """LayerNorm with bias."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in (self.weight, self.bias):
            # megatron-core sums the gradients of parameters with this attribute over the tensor group
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) in FP32, cast to the input's format, then times weight (the order of Llama)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def local_norm(config: TransformerConfig) -> type[nn.Module]:
    """The norm class for a config."""
    return RMSNorm if config.normalization == "RMSNorm" else LayerNorm
