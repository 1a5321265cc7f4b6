"""LayerNorm and RMSNorm that work under sequence parallelism (megatron-core's torch norms do not support it)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megaponder.backbone.fused import fused


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


class HeadSharded(nn.Module):
    """One parameter over the channels of all heads, of which a tensor rank has those of its own heads."""

    def __init__(self, config: TransformerConfig, name: str, channels: int, group: dist.ProcessGroup):
        super().__init__()
        self.name, self.group = name, group
        parameter = nn.Parameter(torch.empty(channels // group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.register_parameter(name, parameter)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For megatron-core's checkpoints."""
        own = self.state_dict(prefix="", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, {self.name: 0}, sharded_offsets)
        return found


@fused
def _sum_of_squares(x: Tensor) -> Tensor:
    return x.float().square().sum(-1, keepdim=True)


@fused
def _normed(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * inverse).to(x.dtype) * weight


@fused
def _products(grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    normed = x.float() * inverse
    return (grad.float() * weight.float() * normed).sum(-1, keepdim=True), (grad * normed).flatten(0, -2).sum(0)


@fused
def _normed_backward(grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
    return (inverse * (grad.float() * weight.float() - x.float() * inverse * mean)).to(x.dtype)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


class _AllHeads(torch.autograd.Function):
    """RMSNorm of x [s, b, c], of whose `channels` each rank of the group has c; only x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, channels: int, group: dist.ProcessGroup) -> Tensor:
        total = _summed(_sum_of_squares(x), group)
        inverse = torch.rsqrt(total / channels + eps)
        ctx.save_for_backward(x, inverse, weight)
        ctx.channels, ctx.group = channels, group
        out: Tensor = _normed(x, inverse, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, weight = ctx.saved_tensors
        grad = grad.contiguous()
        product, for_weight = _products(grad, x, inverse, weight)
        mean = _summed(product, ctx.group) / ctx.channels
        for_x = _normed_backward(grad, x, inverse, weight, mean)
        return for_x, for_weight.to(weight.dtype), None, None, None


class AllHeadsNorm(HeadSharded):
    """RMSNorm over all channels of all heads [s, b, h, d], in FP32; the mean is that of all tensor ranks."""

    weight: nn.Parameter

    def __init__(self, config: TransformerConfig, heads: int, group: dist.ProcessGroup):
        assert config.kv_channels is not None
        self.channels, self.eps = heads * config.kv_channels, config.layernorm_epsilon
        super().__init__(config, "weight", self.channels, group)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _AllHeads.apply(x.flatten(2), self.weight, self.eps, self.channels, self.group)
        return out.view_as(x)


class HeadBias(HeadSharded):
    """A bias on all heads [s, b, h, d]."""

    bias: nn.Parameter

    def __init__(self, config: TransformerConfig, heads: int, group: dist.ProcessGroup):
        assert config.kv_channels is not None
        super().__init__(config, "bias", heads * config.kv_channels, group)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias.view(x.shape[2:])


def local_norm(config: TransformerConfig) -> type[nn.Module]:
    """The norm class for a config."""
    return RMSNorm if config.normalization == "RMSNorm" else LayerNorm
