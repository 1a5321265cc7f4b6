"""The tolerances of every fp32 comparison in the suite; no test widens them for itself."""

from __future__ import annotations

from typing import Any

RTOL = 1e-4
ATOL = 1e-6
PARITY = 1e-5
"""Of logits in FP32, on which exports, transformers and other people's code agree: the largest difference over the
largest logit."""
STEPS_BF16 = 2e-3
"""Of the losses of ten steps in BF16."""


def difference(got: Any, want: Any) -> float:
    """The largest difference of two tensors over the largest value of the second."""
    if not (worst := float((got - want).abs().max())):
        return 0.0
    return worst / float(want.abs().max())
