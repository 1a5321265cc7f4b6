"""An MLP as a sum of narrower ones, exactly.

    f(x) = Wd (silu(Wg x) * Wu x) = sum_i Wd[:, I_i] (silu(Wg[I_i] x) * Wu[I_i] x)

for any blocks I_1 ... I_k of the F neurons that have each of them once.  A block that is narrower than `width` is
filled with neurons whose weights are all 0: they add nothing, and since their gate, their up and their down row are 0
together, none of these ever has a gradient.

Shapes: H hidden, F neurons, w width of a slice.  The first matrix is gate and up, one below the other: [2 F, H].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaponder.backbone.init import stream

UNIT = 16
"""Widths are multiples of it, as matrix products of small formats ask for."""
LITTLE = 0.1
"""Largest share of neurons that are no more than filling, without a word about it."""
HOW = ("contiguous", "random")
"""Which neurons are a slice: neighbours, or drawn from all."""


def width_of(neurons: int, slices: int) -> int:
    """w: of the widest block, rounded up to a multiple of `UNIT`."""
    widest = -(-neurons // slices)
    return -(-widest // UNIT) * UNIT


def filling(neurons: int, slices: int) -> float:
    """Share of the slices' neurons that are filling."""
    return 1 - neurons / (slices * width_of(neurons, slices))


def proposed(neurons: int, slices: int) -> int:
    """The number of slices nearest to `slices` that need no filling; if none does, the largest that needs little."""
    numbers = range(2, max(neurons, 2) + 1)
    if exact := [k for k in numbers if neurons % (k * UNIT) == 0]:
        return min(exact, key=lambda k: abs(k - slices))
    little = [k for k in numbers if filling(neurons, k) <= LITTLE]
    return max(little) if little else min(numbers, key=lambda k: filling(neurons, k))


def filling_warning(neurons: int, slices: int) -> str | None:
    """A sentence where much of the experts would be filling."""
    share, better = filling(neurons, slices), proposed(neurons, slices)
    if share <= LITTLE:
        return None
    fix = "" if better == slices else f"; of --slices {better} it is {filling(neurons, better):.0%}"
    return (
        f"--slices {slices}: experts are {width_of(neurons, slices)} neurons wide, a multiple of {UNIT}, of which "
        f"{share:.0%} are zeros, which cost time and memory and never learn{fix}."
    )


def blocks(neurons: int, slices: int, how: str, seed: int, layer: int) -> list[Tensor]:
    """Numbers of the neurons of each slice of a layer; sizes differ by one at most."""
    if how == "random":
        order = torch.randperm(neurons, generator=stream(seed, f"upcycle.slices.{layer}"))
    else:
        order = torch.arange(neurons)
    return list(order.tensor_split(slices))


def cut(fc1: Tensor, fc2: Tensor, block: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The two matrices [2 w, H] and [H, w] of a slice."""
    gate, up = fc1.chunk(2)
    more = width - len(block)
    filled = [torch.nn.functional.pad(part[block], (0, 0, 0, more)) for part in (gate, up)]
    return torch.cat(filled), torch.nn.functional.pad(fc2[:, block], (0, more))


def join(fc1s: Tensor, fc2s: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The MLP [2 F, H] and [H, F] of all its slices [k, 2 w, H] and [k, H, w]: the inverse of `cut`."""
    neurons = sum(map(len, parts))
    fc1 = fc1s.new_empty(2 * neurons, fc1s.shape[2])
    fc2 = fc2s.new_empty(fc2s.shape[1], neurons)
    for first, second, block in zip(fc1s, fc2s, parts, strict=True):
        gate, up = first.chunk(2)
        fc1[block], fc1[neurons + block] = gate[: len(block)], up[: len(block)]
        fc2[:, block] = second[:, : len(block)]
    return fc1, fc2
