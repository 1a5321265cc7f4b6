"""Frequencies of rotary embedding (RoPE), plain or scaled for longer texts.

    linear    positions are divided by `factor`
    dynamic   NTK: beyond the longest trained length, the base grows with the length of the text
    llama3    low frequencies are divided by `factor`, high ones stay, those between are blended by wavelength
    yarn      the same by number of turns within the original length; cosines and sines grow, too (arXiv 2309.00071)

All as transformers computes them, under its names.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def frequencies(
    size: int, base: float, scaling: dict[str, Any], longest: int, tokens: Tensor | None = None, device: Any = None
) -> tuple[Tensor, float]:
    """Angle per position of each pair of `size` rotated channels [size / 2] FP32, and the factor on cosines and sines.

    `longest`: positions that the model was trained on; `tokens`: the length of this text, for dynamic scaling (None: at
    most `longest`).
    """
    kind, exponent = scaling.get("rope_type"), torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    plain = 1.0 / base**exponent
    if kind is None:
        return plain, 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "dynamic":
        if tokens is None:
            return plain, 1.0
        growth = factor * tokens.clamp(min=longest) / longest - (factor - 1)
        return 1.0 / (base * growth ** (size / (size - 2))) ** exponent, 1.0
    original = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((original * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return plain * kept + plain / factor * (1 - kept), 1.0
    assert kind == "yarn"

    def channel(turns: float) -> float:
        """The pair that turns so many times within the original length."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32, device=device) - first) / (max(last - first, 0) or 0.001)
    divided = ramp.clamp(0, 1)
    return plain * (1 - divided) + plain / factor * divided, _yarn_factor(scaling)


def _yarn_factor(scaling: dict[str, Any]) -> float:
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1.0)
