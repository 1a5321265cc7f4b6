"""What a mixture of experts may be set to; no tensors, so that rules and plans can ask.

Every layer's MLP becomes `experts` MLPs of width `ffn_size` and, for each row, a router chooses `top_k` of them:

    z = W x                                     one logit an expert, FP32
    s = softmax(z) or sigmoid(z)                scores
    T = the top_k experts by s, or by s + bias
    p = scale s_T / sum s_T                     or scale s_T, unless renormalised
    y = sum over T of p_e expert_e(x)  +  shared(x), an MLP of width `shared_ffn` that every row takes
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Experts:
    """The feature `moe` with its defaults filled in."""

    experts: int
    """E: experts of a layer."""
    top_k: int
    """k: experts that a row takes."""
    shared_ffn: int = 0
    """Width of the shared expert; 0: there is none."""
    score: str = "softmax"
    """softmax or sigmoid."""
    renormalise: bool = True
    """The weights of the chosen experts add up to `scale`."""
    scale: float = 1.0
    """Factor on the weights."""
    aux_weight: float = 0.01
    """Weight of the balance loss; 0: there is none."""
    bias_rate: float = 0.0
    """Change of each expert's bias in a step (sigmoid scores); 0: there is no bias."""
    routers: str = "shared"
    """All passes have one router."""


OPTIONS = tuple(f.name for f in fields(Experts))


def read(given: dict[str, Any] | None) -> Experts | None:
    """The feature's value; None where it is off ({}).  ValueError for names that it does not have."""
    if not given:
        return None
    if unknown := given.keys() - set(OPTIONS):
        raise ValueError(f"moe has no {sorted(unknown)}")
    return Experts(**given)
