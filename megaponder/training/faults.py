"""Steps whose numbers are bad: what counts as bad, what follows, and the record of it in `<run>/faults.jsonl`.

A step is bad if its loss or gradient norm is not finite, or, where faults.spike asks for it, a spike: further above the
mean of the last `spike_window` steps than `spike_sd` of their standard deviations (the rule of OLMo; at least half a
window must be known).  A bad step is refused before the optimizer sees it, so parameters, moments and Adam's count stay
as they are.  It keeps its number and its place in the learning-rate schedule, and its sequences count as consumed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import torch

from megaponder.checkpoint.state import TrainState
from megaponder.config.schema import FaultsConfig
from megaponder.errors import UserError
from megaponder.ranks import largest
from megaponder.training.record import FaultRecord, Window


class NotFinite(UserError):  # noqa: N818  the sentence is for a user
    """Loss or gradient norm is NaN or infinite; raised on all ranks at the same step."""


class Verdict(IntEnum):
    """Of a step's numbers; the worst one of any rank holds for all."""

    GOOD = 0
    LOSS_SPIKE = 1
    NORM_SPIKE = 2
    LOSS_NOT_FINITE = 3
    NORM_NOT_FINITE = 4


class Faults:
    """Judges steps, keeps the numbers of the last ones and counts bad ones in a row.  Equal on all ranks."""

    def __init__(self, options: FaultsConfig, run: Path, say: Callable[[str], None], device: torch.device):
        self.options, self.say, self.device = options, say, device
        self.record = FaultRecord(run)
        self.streak: list[int] = []
        """Bad steps in a row, up to now."""
        self._window: Window | None = None
        self._verdict = Verdict.GOOD

    def takes(self, state: TrainState, loss: float, norm: float) -> bool:
        """Whether the step after `state` may update the model: a collective, the same answer on every rank."""
        o, verdict = self.options, Verdict.GOOD
        if not math.isfinite(loss):
            verdict = Verdict.LOSS_NOT_FINITE
        elif not math.isfinite(norm):
            verdict = Verdict.NORM_NOT_FINITE
        elif o.spike != "ignore":
            if is_spike(loss, state.losses, o.spike_window, o.spike_sd):
                verdict = Verdict.LOSS_SPIKE
            elif is_spike(norm, state.norms, o.spike_window, o.spike_sd):
                verdict = Verdict.NORM_SPIKE
        self._verdict = Verdict(largest(int(verdict), self.device))
        return self._verdict is Verdict.GOOD

    def after(self, before: TrainState, state: TrainState, loss: float, norm: float) -> TrainState:
        """`state`, the position after the judged step, with what is remembered of it; NotFinite where that ends a run.

        Spikes are remembered like other steps: a level that lasts is no spike for ever.
        """
        keep, verdict = self.options.spike_window, self._verdict
        if self.options.spike != "ignore" and math.isfinite(loss) and math.isfinite(norm):
            state = replace(state, losses=[*state.losses, loss][-keep:], norms=[*state.norms, norm][-keep:])
        if verdict is Verdict.GOOD:
            self.streak, self._window = [], None
            return state
        if verdict >= Verdict.LOSS_NOT_FINITE and self.options.not_finite == "stop":
            what, value = ("loss", loss) if verdict is Verdict.LOSS_NOT_FINITE else ("gradient norm", norm)
            raise NotFinite(
                f"Step {state.step}: the {what} is {value}; training stopped and no checkpoint was written after it. "
                "Continue from the newest one with a lower optimizer.lr, a longer warm-up or a smaller "
                "optimizer.clip_grad, or let faults.not_finite: skip leave out such steps."
            )
        begin = self._window[0] if self._window else before.sequences
        self._window = (begin, state.sequences)
        self.streak.append(state.step)
        state = replace(state, skipped=state.skipped + 1)
        sequences = (before.sequences, state.sequences)
        self.record.append("skipped", step=state.step, sequences=sequences, why=verdict.name, loss=loss, grad_norm=norm)
        why = _sentence(verdict, loss, norm, before, self.options)
        self.say(f"Step {state.step} is skipped: {why} Skipped so far: {state.skipped}.")
        return state

    @property
    def reason(self) -> str:
        """Why the last step was bad, by the metrics' name."""
        return "spike" if self._verdict <= Verdict.NORM_SPIKE else "nonfinite"

    def must_roll_back(self) -> bool:
        """Whether so many steps were bad in a row that the weights are suspected."""
        return 0 < self.options.rollback_after <= len(self.streak)

    def rolled_back(self, to_step: int) -> None:
        """Remember that the run goes back to `to_step`, and why; UserError if it has done so too often."""
        assert self._window is not None
        before = sum(r["event"] == "rolled_back" and r["to_step"] == to_step for r in self.record.rows())
        first, last = self.streak[0], self.streak[-1]
        if before >= self.options.max_rollbacks:
            raise UserError(
                f"Steps {first} to {last} were skipped in a row, and going back to step {to_step} has not helped "
                f"(faults.max_rollbacks = {self.options.max_rollbacks}); look at {self.record.path} and at sequences "
                f"{self._window[0]} to {self._window[1] - 1} of the data."
            )
        self.record.append(
            "rolled_back", step=last, to_step=to_step, sequences=self._window, skip_data=self.options.skip_data
        )
        left_out = f"; sequences {self._window[0]} to {self._window[1] - 1} are left out from now on"
        self.say(
            f"Steps {first} to {last} were skipped in a row: back to the checkpoint of step {to_step}"
            f"{left_out if self.options.skip_data else ''}."
        )
        self.streak, self._window = [], None


def is_spike(value: float, last: list[float], window: int, sd: float) -> bool:
    """Whether a value lies more than `sd` standard deviations above the mean of the last ones."""
    if len(last) < 2 or 2 * len(last) < window:
        return False
    return value - statistics.fmean(last) > sd * statistics.stdev(last)


def finite(values: dict[str, float]) -> dict[str, float]:
    """Those that are numbers."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _sentence(verdict: Verdict, loss: float, norm: float, before: TrainState, options: FaultsConfig) -> str:
    if verdict is Verdict.LOSS_NOT_FINITE:
        return f"its loss is {loss}."
    if verdict is Verdict.NORM_NOT_FINITE:
        return f"its gradient norm is {norm}."
    spike = verdict is Verdict.LOSS_SPIKE
    what, value, last = ("loss", loss, before.losses) if spike else ("gradient norm", norm, before.norms)
    mean, deviation = statistics.fmean(last), statistics.stdev(last)
    return (
        f"its {what} {value:.4g} is more than {options.spike_sd:g} standard deviations above the mean of the last "
        f"{len(last)} steps ({mean:.4g}, sd {deviation:.2g})."
    )
