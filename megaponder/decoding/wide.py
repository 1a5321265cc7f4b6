"""Numbers in float32 at least.  Training shares what is built on them, and must not have to import transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def wide(x: Tensor) -> Tensor:
    """In float32, unless x is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """A Linear in float32 at least: decisions must not depend on rounding."""
    return F.linear(wide(x), wide(module.weight), wide(module.bias))  # type: ignore[arg-type]
