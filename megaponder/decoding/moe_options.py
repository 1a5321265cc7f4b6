"""What a mixture of experts may be set to; no tensors, so that rules and plans can ask.

Every layer's MLP becomes `experts` MLPs of width `ffn_size` and, for each row, a router chooses `top_k` of them:

    z = W x                                     one logit an expert, FP32
    s = softmax(z) or sigmoid(z)                scores
    T = the top_k experts by s, or by s + bias
    p = scale s_T / sum s_T                     or scale s_T, unless renormalised
    y = sum over T of p_e expert_e(x)  +  shared(x), an MLP of width `shared_ffn` that every row takes

With several routers W and bias are those of the row's step: its pass or, where a token has several rows in a pass
(latents, pauses), its place among them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    routers: str | int = "shared"
    """shared: all steps have one router.  A number: so many, for a token's first steps; later ones take the last.  A
    configuration may say per_pass, which becomes the number of a token's steps (`ponder.settings.with_routers`)."""

    @property
    def router_count(self) -> int:
        """Routers of a layer."""
        return 1 if self.routers == "shared" else int(self.routers)

    def routers_of(self, steps: Sequence[int]) -> tuple[int, ...]:
        """The routers of rows that are at these steps in turn; one number if they have the same."""
        found = tuple(min(step, self.router_count - 1) for step in steps)
        return found[:1] if len(set(found)) == 1 else found


OPTIONS = tuple(f.name for f in fields(Experts))


def read(given: dict[str, Any] | None) -> Experts | None:
    """The feature's value; None where it is off ({}).  ValueError for names that it does not have."""
    if not given:
        return None
    if unknown := given.keys() - set(OPTIONS):
        raise ValueError(f"moe has no {sorted(unknown)}")
    return Experts(**given)
