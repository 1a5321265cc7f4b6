"""Steps with a bad loss or gradient norm: what counts as bad, what follows, and the record in `<run>/faults.jsonl`.

A step in which no target counts has no loss: nothing is learnt from it, and its update (weight decay, moments) is
skipped.  The weights are fine, so it is no reason for a rollback; too many such steps in a row stop the run.

A step is bad if its loss or gradient norm is not finite, or, where faults.spike asks for it, a spike: more than
`spike_sd` standard deviations above the mean of the last `spike_window` steps (OLMo's rule; at least half a window must
be known).  A bad step is rejected before the optimizer sees it, so parameters, moments and Adam's step count do not
change.  It keeps its number and its place in the learning-rate schedule, and its sequences count as consumed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaponder.checkpoint.state import TrainState
from megaponder.config.schema import FaultsConfig
from megaponder.data.stream import SampleStream
from megaponder.errors import UserError
from megaponder.ranks import largest
from megaponder.training.fault_record import FaultRecord, Window

if TYPE_CHECKING:
    from megaponder.engine.step import StepOutput


Source = Callable[[int, int], str]
"""The datasets that sequences first ... end - 1 of the training stream come from, in words."""


class NotFinite(UserError):  # noqa: N818  the sentence is for a user
    """Loss or gradient norm is NaN or infinite; raised on all ranks at the same step."""


class Verdict(IntEnum):
    """Verdict on a step's loss and gradient norm; the worst one of any rank applies to all."""

    GOOD = 0
    LOSS_SPIKE = 1
    NORM_SPIKE = 2
    LOSS_NOT_FINITE = 3
    NORM_NOT_FINITE = 4
    NO_TARGETS = 5


class Faults:
    """Judges steps, keeps the losses and norms of the last ones and counts consecutive bad ones.  Equal on all
    ranks."""

    def __init__(self, options: FaultsConfig, run: Path, say: Callable[[str], None], device: torch.device):
        self.options, self.say, self.device = options, say, device
        self.record = FaultRecord(run)
        self.streak: list[int] = []
        """Consecutive bad steps up to now."""
        self.empty: list[int] = []
        """Consecutive steps without a target up to now."""
        self.starved: str | None = None
        """Why the run must stop: too many consecutive steps or evaluations without a target."""
        self._sound: TrainState | None = None
        self._empty_evaluations = 0
        self._window: Window | None = None
        self._verdict = Verdict.GOOD

    def takes(self, state: TrainState, out: StepOutput, norm: float) -> bool:
        """Whether the step after `state` may update the model: a collective, the same answer on every rank."""
        o, verdict, loss = self.options, Verdict.GOOD, out.loss
        if not out.tokens:
            verdict = Verdict.NO_TARGETS
        elif not math.isfinite(loss):
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

    def after(self, before: TrainState, state: TrainState, loss: float, norm: float, source: Source) -> TrainState:
        """`state`, the position after the judged step, with its record; NotFinite if that ends the run.

        `source` tells which datasets a window of sequences comes from.
        Spikes are recorded like other steps: a lasting level is not a spike for ever.
        """
        keep, verdict = self.options.spike_window, self._verdict
        if verdict is Verdict.NO_TARGETS:
            return self._without_targets(before, state, source)
        self.empty, self._sound = [], None
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
                "optimizer.clip_grad, or skip such steps with faults.not_finite: skip."
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

    def _without_targets(self, before: TrainState, state: TrainState, source: Source) -> TrainState:
        if self._sound is None:
            self._sound = before
        self.empty.append(state.step)
        state = replace(state, skipped=state.skipped + 1)
        sequences = (before.sequences, state.sequences)
        self.record.append("skipped", step=state.step, sequences=sequences, why=Verdict.NO_TARGETS.name)
        where = f"sequences {sequences[0]} to {sequences[1] - 1} of {source(*sequences)}"
        self.say(f"Step {state.step} is skipped: no target in {where} counts. Skipped so far: {state.skipped}.")
        if len(self.empty) > self.options.max_without_targets:
            first = self._sound.sequences
            self.starved = (
                f"Steps {self.empty[0]} to {state.step} have no target that counts in the loss (data.loss_mask), more "
                f"than faults.max_without_targets = {self.options.max_without_targets} in a row: sequences {first} to "
                f"{state.sequences - 1} of data.train, from {source(first, state.sequences)}; check these datasets "
                "with megaponder inspect --audit"
            )
        return state

    @property
    def sound(self) -> TrainState | None:
        """Where to save a run that must stop for steps without a target: before them, as no weight has changed since.

        A later start then reads these sequences again, which may have been fixed.  None in other cases.
        """
        return self._sound if self.starved else None

    def starved_after(self, saved_step: int) -> UserError:
        """Why the run must stop, and what is saved."""
        kept = f"; training up to step {saved_step} is saved" if saved_step else ""
        return UserError(f"{self.starved}{kept}.")

    def evaluated(self, step: int, loss: float | None, valid: Mapping[str, SampleStream]) -> int:
        """Counts and reports consecutive evaluations of `valid` without a target; returns how many there are up to
        now."""
        if loss is not None:
            self._empty_evaluations = 0
            return 0
        self._empty_evaluations += 1
        source = ", ".join(stream.source(0, len(stream)) for stream in valid.values())
        self.say(f"The evaluation after step {step} has no loss: no target in {source} counts.")
        if self._empty_evaluations > self.options.max_without_targets:
            self.starved = (
                f"{self._empty_evaluations} evaluations in a row, up to that after step {step}, have no target that "
                "counts in the loss (data.loss_mask), more than faults.max_without_targets = "
                f"{self.options.max_without_targets}: all of {source}; use other validation data, or none with "
                "train.eval_batches: 0"
            )
        return self._empty_evaluations

    @property
    def reason(self) -> str:
        """Why the last step was skipped, as named in the metrics; empty if it was not."""
        if self._verdict is Verdict.GOOD:
            return ""
        if self._verdict is Verdict.NO_TARGETS:
            return "no_targets"
        return "spike" if self._verdict <= Verdict.NORM_SPIKE else "nonfinite"

    @property
    def skips(self) -> bool:
        """Whether the last steps were skipped."""
        return bool(self.streak or self.empty)

    def must_roll_back(self) -> bool:
        """Whether enough consecutive steps were bad to suspect the weights."""
        return 0 < self.options.rollback_after <= len(self.streak)

    def rolled_back(self, to_step: int) -> None:
        """Record that the run goes back to `to_step`, and why; UserError if it has done so too often."""
        assert self._window is not None
        before = sum(r["event"] == "rolled_back" and r["to_step"] == to_step for r in self.record.rows())
        first, last = self.streak[0], self.streak[-1]
        if before >= self.options.max_rollbacks:
            raise UserError(
                f"Steps {first} to {last} were skipped in a row, and going back to step {to_step} has not helped "
                f"(faults.max_rollbacks = {self.options.max_rollbacks}); check {self.record.path} and sequences "
                f"{self._window[0]} to {self._window[1] - 1} of the data."
            )
        self.record.append(
            "rolled_back", step=last, to_step=to_step, sequences=self._window, skip_data=self.options.skip_data
        )
        left_out = f"; sequences {self._window[0]} to {self._window[1] - 1} are skipped from now on"
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
