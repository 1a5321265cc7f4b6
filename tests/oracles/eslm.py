"""ESLM once more, plainly: scores from logits, tokens above a share of them, and how much each token counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def scores(logits: Tensor, labels: Tensor, by: str) -> Tensor:
    """float64, of logits [..., V]."""
    p = logits.double().softmax(-1)
    if by == "entropy":
        return -(p * p.log()).sum(-1)
    return -p.gather(-1, labels[..., None])[..., 0].log()


def weights(found: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """Of the tokens of one scope, float64 of the shape of `found`."""
    pairs = sorted(s for s, m in zip(found.flatten().tolist(), mask.flatten().tolist(), strict=True) if m)
    if not pairs:
        return torch.zeros_like(found)
    low = pairs[math.floor(round(alpha * len(pairs), 6))]
    kept = ((found >= low) & (mask > 0)).double()
    return kept * len(pairs) / kept.sum()


def of_batches(logits: Tensor, labels: Tensor, mask: Tensor, options: dict, sizes: Sequence[int]) -> Tensor:
    """Of a batch [b, n] that is cut into micro-batches of so many sequences."""
    found, alpha = scores(logits, labels, options["by"]), options.get("alpha", 0.1)
    if options.get("scope") == "global":
        return weights(found, mask, alpha)
    parts = zip(found.split(list(sizes)), mask.split(list(sizes)), strict=True)
    return torch.cat([weights(s, m, alpha) for s, m in parts])
