"""Chains of elementwise operations as one kernel each, written by torch.compile for GPUs; a CPU runs them as they are.

A layer's GEMMs and attention are libraries'; what is left between them is bound by memory traffic, so each chain reads
its inputs once and writes its output once.  Every chain is a plain function of tensors and differentiable.

Where a chain's own derivative would be several kernels, or more arithmetic than its closed form, it is an
autograd.Function of two fused functions.

Shapes: s rows, b micro-batch, h heads, g key/value heads, d head size, r rotated channels of d, F feed-forward width.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = 64
"""Shapes for which a function is compiled; beyond that it would run as it is."""
Function = TypeVar("Function", bound=Callable[..., Any])


def fused(function: Function, **options: Any) -> Function:
    """Decorator: compile at the first call with a CUDA tensor; elsewhere call the function itself."""
    ready: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not any(isinstance(a, Tensor) and a.is_cuda for a in args):
            return function(*args)
        if not ready:
            # few shapes occur, and kernels for any shape are a third slower; gathered passes have 16 sizes
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
            ready.append(torch.compile(function, dynamic=False, options=options or None))
        return ready[0](*args)

    return call  # type: ignore[return-value]


def one_kernel(function: Function) -> Function:
    """`fused` for a function that ends in a concatenation whose parts share no input: no part is stored by itself."""
    return fused(function, force_pointwise_cat=True, realize_reads_threshold=64, realize_opcount_threshold=1000)


def _packed(grads: Sequence[Tensor]) -> list[Tensor]:
    """One layout, hence one kernel: gradients from an attention kernel or from a sum may lie in any order."""
    return [g.contiguous() for g in grads]


# --- activations ------------------------------------------------------------------------------------------------------
LOG2_TAIL = (
    -0.99999434, -1.15126915, -0.458409777, -0.0540206871, 8.53946133e-3, -9.38867933e-4, 6.26814010e-5, -1.88962623e-6
)  # fmt: skip
"""log2 of the standard normal's upper tail at z >= 0 as a polynomial: least squares on Chebyshev points of [0, 6].

The tail is within 4e-6 of itself up to z = 4.5, and falls to 0 beyond 6.
"""


def normal(x: Tensor) -> Tensor:
    """Distribution function of the standard normal: a library's erf takes longer than reading and writing x does."""
    z, exponent = x.abs(), torch.full_like(x, LOG2_TAIL[-1])
    for c in LOG2_TAIL[-2::-1]:
        exponent = exponent * z + c
    tail = torch.exp2(exponent)
    return torch.where(x > 0, 1.0 - tail, tail)


@fused
def _gelu_forward(x: Tensor, bias: Tensor) -> Tensor:
    z = (x + bias).float()
    return (z * normal(z)).to(x.dtype)


@fused
def _gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    z = (x + bias).float()
    density = torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    grad = (grad.float() * (normal(z) + z * density)).to(x.dtype)
    return grad, grad.flatten(0, -2).sum(0)


class _GeluBF16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        out: Tensor = _gelu_forward(x, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = _gelu_backward(grad.contiguous(), *ctx.saved_tensors)
        return out


def gelu_bf16(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of x + bias [s, b, F] within 7e-7 and the rounding of BF16."""
    out: Tensor = _GeluBF16.apply(x, bias)
    return out


@fused
def _gelu_exact(x: Tensor, bias: Tensor | None) -> Tensor:
    return F.gelu(x if bias is None else x + bias)


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Exact (erf) GELU of x + bias [s, b, F], on GPUs in BF16 by `gelu_bf16`."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return gelu_bf16(x, x.new_zeros(x.shape[-1]) if bias is None else bias)
    return _gelu_exact(x, bias)


@fused
def gelu_tanh(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """GPT-2's GELU of x + bias [s, b, F]."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@fused
def _swiglu_forward(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@fused
def _swiglu_closed_form(grad: Tensor, x: Tensor) -> Tensor:
    gate, up = (h if x.dtype == torch.float64 else h.float() for h in x.chunk(2, dim=-1))
    turned = torch.sigmoid(gate)
    silu = gate * turned
    return torch.cat([grad * up * (turned + silu * (1 - turned)), grad * silu], dim=-1).to(x.dtype)


def _swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    te = sys.modules.get("transformer_engine_torch")  # loaded where its layers run
    out: Tensor
    if te is None or not x.is_cuda:
        out = _swiglu_closed_form(grad, x)
    else:  # 7 % over the time that memory needs, where torch.compile's kernel is 45 % over it
        out = te.dswiglu(grad.flatten(0, -2), x.flatten(0, -2), None).view_as(x)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out: Tensor = _swiglu_forward(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _swiglu_backward(grad.contiguous(), *ctx.saved_tensors)


def swiglu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(first half) * second half of x + bias: [s, b, 2F] -> [s, b, F]."""
    out: Tensor = _SwiGLU.apply(x if bias is None else x + bias)
    return out


# --- residuals --------------------------------------------------------------------------------------------------------
@fused
def add_biased(x: Tensor, out: Tensor, bias: Tensor) -> Tensor:
    """x + out + bias [s, b, H]."""
    return x + (out + bias)


@fused
def add_biased_twice(x: Tensor, a: Tensor, bias_a: Tensor, c: Tensor, bias_c: Tensor) -> Tensor:
    """x + (a + bias_a) + (c + bias_c) [s, b, H]: a parallel residual."""
    return x + (a + bias_a) + (c + bias_c)


@fused
def _sum3(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a + b + c


class _Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.view_as(x), x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        out: Tensor = _sum3(*_packed(grads))
        return out


def thrice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x for three uses, whose gradients are added by one kernel."""
    out: tuple[Tensor, Tensor, Tensor] = _Thrice.apply(x)
    return out


# --- queries, keys, values --------------------------------------------------------------------------------------------
def turns(angles: Tensor) -> Tensor:
    """Cosines and sines [2, s, 1 or b, 1, r] of angles [s, 1 or b, 1, r]."""
    return torch.stack([angles.cos(), angles.sin()])


def rotated(x: Tensor, turn: Tensor, sign: float = 1.0) -> Tensor:
    """RoPE on the first r channels (two halves that turn together) of x [s, b, h, d]; sign -1 turns back."""
    r = turn.shape[-1]
    turned, rest = x[..., :r], x[..., r:]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = turn[0].to(x.dtype), sign * turn[1].to(x.dtype)
    out = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([out, rest], dim=-1) if rest.shape[-1] else out


@one_kernel
def _split_forward(qkv: Tensor, turn: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split(qkv, heads, groups)
    return rotated(q, turn), rotated(k, turn), v.contiguous()


@one_kernel
def _split_backward(dq: Tensor, dk: Tensor, dv: Tensor, turn: Tensor) -> Tensor:
    groups = dk.shape[2]
    dq, dk = rotated(dq, turn, -1.0), rotated(dk, turn, -1.0)
    return torch.cat([dq.unflatten(2, (groups, -1)), dk[:, :, :, None], dv[:, :, :, None]], dim=3).flatten(2)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, turn: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(turn)
        out: tuple[Tensor, Tensor, Tensor] = _split_forward(qkv, turn, heads, groups)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _split_backward(*_packed(grads), *ctx.saved_tensors), None, None, None


def split_rotated(qkv: Tensor, turn: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [s, b, h, d], keys and values [s, b, g, d] after RoPE, from megatron-core's fused projection.

    `turn`: see `turns`.
    """
    out: tuple[Tensor, Tensor, Tensor] = _Split.apply(qkv, turn, heads, groups)
    return out


def split(qkv: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same without RoPE; each group of the projection is its query heads, then its key, then its value."""
    each = heads // groups
    x = qkv.unflatten(-1, (groups, each + 2, -1))
    return x[..., :each, :].flatten(2, 3), x[..., each, :], x[..., each + 1, :]
