"""Rates between two rows: tokens, FLOPs and their share of the peak.

Conventions, printed at the start of a run: a multiply-add is 2 FLOPs, attention counts its causal half, backward is
twice forward.  MFU counts the needed FLOPs, HFU those executed (with recompute); both per device, over the BF16 peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaponder.plan.flops import StepFlops

TERA = 1e12


@dataclass(frozen=True)
class Costs:
    """What a token costs and what a device can do."""

    needed: float
    """Training FLOPs per token that the method needs."""
    executed: float
    """With what is run again (recompute)."""
    devices: int
    peak_tflops: float | None
    """Of one device; None when it is not known, and then no utilisation is shown."""
    plan: StepFlops | None = None
    """FLOPs by pass, where halted tokens do not need them."""

    def needed_share(self, active: Sequence[float]) -> float:
        """Share of the needed FLOPs that remains if only these shares of the tokens run each pass."""
        if self.plan is None or len(active) != len(self.plan.passes):
            return 1.0
        return self.plan.needed_of(active) / self.plan.needed

    def sentence(self) -> str:
        """The numbers and their convention, for the start of a run."""
        peak = f"{self.peak_tflops:g} TFLOP/s a device" if self.peak_tflops else "unknown, so MFU and HFU are not shown"
        return (
            f"FLOPs per token: {self.needed:.4g} needed (MFU), {self.executed:.4g} executed (HFU); multiply-add = 2, "
            f"causal half of attention, backward = 2 x forward. Peak: {peak}."
        )


class Throughput:
    """Rates over the steps since the last row."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self.restart(0, 0)

    def restart(self, step: int, tokens: int) -> None:
        """Start a new interval at this position."""
        self._step, self._tokens = step, tokens

    def rates(self, step: int, tokens: int, seconds: float, needed_share: float = 1.0) -> dict[str, float]:
        """Values of a row at this position, `seconds` of training after the last; starts the next interval.

        `needed_share`: see `Costs.needed_share`.
        """
        seconds = max(1e-9, seconds)
        steps, done, c = step - self._step, tokens - self._tokens, self.costs
        self.restart(step, tokens)
        per_device = done / seconds / c.devices
        values = {
            "step_seconds": seconds / max(1, steps),
            "tokens_per_second": done / seconds,
            "tokens_per_second_per_device": per_device,
            "tflops_per_device": per_device * c.needed * needed_share / TERA,
        }
        if c.peak_tflops:
            values["mfu"] = values["tflops_per_device"] / c.peak_tflops
            values["hfu"] = per_device * c.executed / TERA / c.peak_tflops
        return values
