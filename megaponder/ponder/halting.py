"""What the adaptive methods share: gates in FP32, ramps, bottom-k selection, and checks of their options."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaponder.decoding.noise import document_sums
from megaponder.decoding.ranges import RANGES, Mistake, broken, unknown
from megaponder.errors import ConfigError


class _ExactProduct(torch.autograd.Function):
    """x w^T of BF16 matrices in FP32: TF32 holds BF16 values exactly, so only the gradient is rounded, to BF16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return x.float() @ w.float().t()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return grad @ w, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def linear32(module: nn.Module, x: Tensor) -> Tensor:
    """A Linear in FP32, whatever the precision of the model: decisions must not depend on rounding."""
    assert isinstance(module, nn.Linear)
    if x.is_cuda and x.dtype is torch.bfloat16 and module.weight.dtype is torch.bfloat16:
        out: Tensor = _ExactProduct.apply(x, module.weight)
        return out if module.bias is None else out + module.bias.float()
    return F.linear(x.float(), module.weight.float(), None if module.bias is None else module.bias.float())


def router32(module: nn.Module, x: Tensor) -> Tensor:
    """Logits [..., 1] of a `decoding.gates.router`, in FP32."""
    if isinstance(module, nn.Linear):
        return linear32(module, x)
    assert isinstance(module, nn.Sequential)
    return linear32(module[2], torch.relu(linear32(module[0], x)))


def starts_at(module: nn.Linear | nn.Sequential, bias: float) -> nn.Linear | nn.Sequential:
    """A router whose logit is `bias` for every state, until it learns."""
    last = module if isinstance(module, nn.Linear) else module[2]
    nn.init.zeros_(last.weight)  # type: ignore[arg-type]
    nn.init.constant_(last.bias, bias)  # type: ignore[arg-type]
    return module


def one_of(options: object, name: str, legal: Iterable[str]) -> None:
    """Refuse a word that an option does not know."""
    refuse(unknown(name, getattr(options, name), legal))


def ramp(step: Tensor | None, start: int, end: int) -> Tensor | float:
    """0 before `start`, 1 from `end` on, linear between; 1 in evaluation (step None)."""
    if step is None or end <= 0:
        return 1.0
    if end == start:
        return (step >= end).to(step.dtype)
    return ((step - start) / (end - start)).clamp(0.0, 1.0)


def smallest(
    values: Tensor, mask: Tensor, share: float | Tensor, starts_nb: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The smallest ceil(share * count) masked values of each sequence, or of each document.

    values, mask [passes, n, b]; returns (selection [passes, n, b], selected per sequence [b]).  Equal values are taken
    in the order of pass and token, so that the selection is a function of the values alone.  With `starts_nb`
    (`ExitTools.starts_nb`) the share is that of each document; selected is then given for each token's document [n, b].
    """
    passes, n, b = values.shape
    flat = torch.where(mask, values, torch.full_like(values, math.inf)).reshape(passes * n, b)
    order = flat.argsort(dim=0, stable=True)
    if starts_nb is None:
        asked = mask.reshape(passes * n, b).sum(0)
    else:
        asked = document_sums(mask.sum(0).t(), starts_nb.t()).t()
        order = order.gather(0, starts_nb.repeat(passes, 1).gather(0, order).argsort(dim=0, stable=True))
    count = torch.ceil(share * asked.double()).long()
    rank = torch.empty_like(order).scatter_(
        0, order, torch.arange(passes * n, device=order.device)[:, None].expand(-1, b)
    )
    bound = count
    if starts_nb is not None:
        bound = (passes * starts_nb + count).repeat(passes, 1)  # that many values of earlier documents come before
    return (rank < bound).view(passes, n, b) & mask, count


def at_least(options: object, name: str, least: float) -> None:
    """Refuse an option below its least value."""
    _within(options, name, least)


def fraction(options: object, name: str) -> None:
    """Refuse an option outside 0 to 1."""
    _within(options, name, 0, 1)


def as_decoded(options: object, *names: str) -> None:
    """Refuse options outside the ranges that they have as arguments of a call."""
    for name in names:
        _within(options, name, *RANGES[name])


def refuse(mistake: Mistake | None) -> None:
    """ConfigError for a mistake in options that decoding reads."""
    if mistake is not None:
        raise ConfigError(f"ponder.options.{mistake[0]}", *mistake[1:])


def _within(options: object, name: str, *bounds: Any) -> None:
    value = getattr(options, name)
    if (told := broken(value, *bounds)) is not None:
        refuse((name, value, *told))


def ordered(options: object, start: str, end: str) -> None:
    """Refuse a ramp that ends before it starts."""
    a, b = getattr(options, start), getattr(options, end)
    if a < 0 or b < a:
        raise ConfigError(
            f"ponder.options.{end}", b, f"it must be at least {start} = {a}, which is at least 0", f"use {max(a, 0)}"
        )
