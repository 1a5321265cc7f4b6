"""Chains of elementwise operations as one kernel each, written by torch.compile for GPUs; a CPU runs them as they are.

A layer's GEMMs and attention are libraries'; what is left between them is bound by memory traffic, so each chain reads
its inputs once and writes its output once.  Every chain is a plain function of tensors and differentiable.

Shapes: s rows, b micro-batch, h heads, g key/value heads, d head size, r rotated channels of d, F feed-forward width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = 64
"""Shapes for which a function is compiled; beyond that it would run as it is."""
Function = TypeVar("Function", bound=Callable[..., Any])


def fused(function: Function) -> Function:
    """Decorator: compile at the first call with a CUDA tensor; elsewhere call the function itself."""
    ready: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not any(isinstance(a, Tensor) and a.is_cuda for a in args):
            return function(*args)
        if not ready:
            # few shapes occur, and kernels for any shape are a third slower; gathered passes have 16 sizes
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
            ready.append(torch.compile(function, dynamic=False))
        return ready[0](*args)

    return call  # type: ignore[return-value]


@fused
def gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Exact (erf) GELU of x + bias [s, b, F]."""
    return F.gelu(x + bias)


@fused
def gelu_tanh(x: Tensor, bias: Tensor) -> Tensor:
    """GPT-2's GELU of x + bias [s, b, F]."""
    return F.gelu(x + bias, approximate="tanh")


@fused
def swiglu(x: Tensor) -> Tensor:
    """silu(first half) * second half: [s, b, 2F] -> [s, b, F]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@fused
def add_biased(x: Tensor, out: Tensor, bias: Tensor) -> Tensor:
    """x + out + bias [s, b, H]."""
    return x + (out + bias)


@fused
def add_biased_twice(x: Tensor, a: Tensor, bias_a: Tensor, c: Tensor, bias_c: Tensor) -> Tensor:
    """x + (a + bias_a) + (c + bias_c) [s, b, H]: a parallel residual."""
    return x + (a + bias_a) + (c + bias_c)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE on the first r channels: x [s, b, h, d], angles [s, 1 or b, 1, r] in FP32 (two equal halves)."""
    r = angles.shape[-1]
    turned, rest = x[..., :r], x[..., r:]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    out = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([out, rest], dim=-1) if rest.shape[-1] else out


@fused
def split_rotated(qkv: Tensor, angles: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [s, b, h, d], keys and values [s, b, g, d] after RoPE, from megatron-core's fused projection."""
    q, k, v = split(qkv, heads, groups)
    return _rotated(q, angles), _rotated(k, angles), v.contiguous()


def split(qkv: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same without RoPE; each group of the projection is its query heads, then its key, then its value."""
    each = heads // groups
    x = qkv.unflatten(-1, (groups, each + 2, -1))
    return x[..., :each, :].flatten(2, 3), x[..., each, :], x[..., each + 1, :]
