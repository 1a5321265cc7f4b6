"""One global batch: its micro-batches on this rank, one denominator for every loss, and the step's numbers.

How micro-batches run and gradients are reduced is what an engine differs in: `engine.pipelined` has megatron-core's
schedules, `engine.zero` has DeepSpeed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megaponder.backbone.context import part_of
from megaponder.config.in_flight import in_flight
from megaponder.config.rules.layout import choose_group
from megaponder.data.batch import MicroBatch, tensors_of
from megaponder.engine import depth, selection
from megaponder.engine.chunks import Runner, Step
from megaponder.engine.groups import Groups
from megaponder.engine.model import Z_LOSS, PonderStage, is_watched, loss_of_pass
from megaponder.engine.stash import PassState
from megaponder.engine.stopwatch import Stopwatch
from megaponder.ponder.base import Pass, Readout


@dataclass
class StepOutput:
    """Means over the valid tokens of the global batch; equal on every rank."""

    loss: float
    """If no target counts there is nothing to average: this and `aux` are NaN, and `stats` is empty."""
    aux: float
    tokens: int
    stats: dict[str, float] = field(default_factory=dict)
    passes: int = field(default=1, compare=False)
    """Passes that the step ran."""
    by_token: Tensor | None = field(default=None, compare=False)
    """Evaluation of a method with halting: `Objective.by_token` of the global batch, on the CPU."""
    z_loss: float = 0.0
    """In the gradient beside the loss, and not in it."""
    selected: dict[str, float] = field(default_factory=dict)
    """`selection.STATS` and the alpha of a step that selects tokens; `loss` stays the mean over all."""
    balance: dict[str, float] = field(default_factory=dict)
    """Training with a mixture of experts: `engine.balance.NAMES`."""
    empty: int = field(default=0, compare=False)
    """Micro-batches of the global batch in which no target counts."""


def _on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    parts = (None if t is None else t.to(device, non_blocking=True) for t in tensors_of(batch))
    return MicroBatch(*parts)  # type: ignore[arg-type]


def part_of_batch(batch: MicroBatch, size: int, rank: int) -> MicroBatch:
    """The tokens of each sequence that one of `size` context ranks holds, and their places."""
    starts, places = batch.starts_bn, torch.arange(batch.ids_bn.shape[1], device=batch.ids_bn.device)
    return replace(
        batch,
        ids_bn=part_of(batch.ids_bn, size, rank, 1),
        labels_bn=part_of(batch.labels_bn, size, rank, 1),
        loss_mask_bn=part_of(batch.loss_mask_bn, size, rank, 1),
        starts_bn=None if starts is None else part_of(starts, size, rank, 1),
        edges=None,
        places_n=part_of(places, size, rank),
    )


class Engine(ABC):
    """One pipeline rank: its stage, and what runs micro-batches through it, forward and backward."""

    def __init__(self, stage: PonderStage, groups: Groups, seed: int, group_size: int | None, runner: Runner):
        self.stage, self.groups = stage, groups
        self._runner, self._seed, self._group_size = runner, seed, group_size
        self.own_time = Stopwatch(groups.device)
        """Time of the last training step, from its first forward up to the reduction of gradients."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the gradients of earlier steps."""

    @abstractmethod
    def whole_parameters(self) -> AbstractContextManager[None]:
        """All parameters are up to date inside, where they otherwise arrive during the next forward."""

    @abstractmethod
    def _schedule(self, run: Step, forward_only: bool) -> None:
        """Forward, and unless `forward_only` backward, of this rank's micro-batches; gradients are reduced."""

    @abstractmethod
    def _begin(self, passes: Sequence[Pass]) -> None:
        """A training step with this plan follows."""

    def fp8_amax(self) -> dict[str, float]:
        """Row values `fp8_amax_...` of the last training step (`Fp8.amax`)."""
        found = self.stage.fp8.amax() if self.stage.fp8 else {}
        return {f"fp8_amax_{tensor}": value for tensor, value in found.items()}

    @abstractmethod
    def close(self) -> None:
        """Release whatever would keep the process groups alive."""

    def passes(self, step: int | None) -> Sequence[Pass]:
        """The method's plan for a training step, or for evaluation (None): the same on every rank."""
        return self.stage.method.passes(self._seed, step)

    def forward_backward(self, batches: Sequence[MicroBatch], step: int, train: bool) -> StepOutput:
        """Run this rank's micro-batches of a global batch: whole sequences, of which it takes its part.

        With `train`, the engine's optimizer afterwards has the gradient of the mean loss over the global batch's valid
        tokens, reduced over all groups, or this rank's shard of it.
        """
        batches = [_on_device(b, self.groups.device) for b in batches]
        each = torch.stack([b.loss_mask_bn.sum() for b in batches]).float()
        of_disciplines = each.new_zeros(())
        for b in batches:
            if b.disciplines_b is not None:
                of_disciplines = of_disciplines + (b.loss_mask_bn.sum(1) * (b.disciplines_b >= 0)).sum()
        counts = torch.stack([each.sum(), (each == 0).sum(), of_disciplines])
        dist.all_reduce(counts, group=self.groups.dp)
        tokens = counts[0]
        if self.groups.cp_size > 1:
            batches = [part_of_batch(b, self.groups.cp_size, self.groups.cp_rank) for b in batches]
        number = torch.tensor(float(step), dtype=torch.float64, device=self.groups.device) if train else None
        passes, g = self.passes(step if train else None), self.groups
        group = self._group(len(batches))
        flight = in_flight(g.pp_rank, g.pp_size, len(passes), len(batches), group)
        tokens = tokens.clamp(min=1.0)
        run = Step(passes, batches, number, tokens, flight)
        if self.stage.fp8:
            self.stage.fp8.begin_step()
        self.own_time.start()
        if train and self.stage.selection is not None:
            run = self._selected(run, self.stage.selection)
        if self.stage.balance is not None:
            self.stage.balance.begin(passes, run.tokens, train, counts[2].clamp(min=1.0))
        if train:
            self._begin(passes)
        with torch.set_grad_enabled(train):
            self._schedule(run, forward_only=not train)
        if self.stage.fp8 and train:
            self.stage.fp8.end_step()
        valid, empty, _ = counts.tolist()
        out = self._collect(run, int(valid))
        out.empty = int(empty)
        out.passes = len(run.passes)
        if train and self.stage.balance is not None:
            found = self.stage.balance.collect(self.groups)
            out.balance = found if valid else {}
        return out

    def _selected(self, run: Step, select: selection.Selection) -> Step:
        """The step with the weights of all tokens in its micro-batches, where all scores must be known before."""
        if not select.options.scores_first(len(run.batches)):
            return run
        masks: list[Tensor] = [b.loss_mask_bn for b in run.batches]
        weights, sums = masks, []
        if select.alpha > 0:
            with torch.no_grad():
                self._schedule(run, forward_only=True)
            if self.groups.is_last_stage:
                found = select.weigh_all([(s, m.t()) for s, m in zip(run.scores, masks, strict=True)])
                weights = [one.weights_nb.t().contiguous() for one in found]
                threshold = found[0].threshold
                assert threshold is not None
                total = selection.threshold_sum(threshold, torch.cat(masks)) / run.tokens
                sums.append({selection.PREFIX + selection.STATS[-1]: total})
        batches = [replace(b, weights_bn=w) for b, w in zip(run.batches, weights, strict=True)]
        return Step(run.passes, batches, run.number, run.tokens, run.flight, sums)

    def settle(self, out: StepOutput, step: int) -> None:
        """After an optimizer step was taken: what the method updates from the step's statistics."""
        if self.stage.balance is not None:
            self.stage.balance.settle()
        modules = self.stage.method_modules if self.groups.is_last_stage else None
        out.stats |= self.stage.method.settle(modules, out.stats, step)

    def _group(self, micro_batches: int) -> int:
        """Micro-batches that run through one pass before the next pass starts."""
        return self._group_size or choose_group(micro_batches, self.groups.pp_size) or micro_batches

    def _collect(self, run: Step, tokens: int) -> StepOutput:
        """Sum over micro-batches and ranks with other tokens, then broadcast to every pipeline stage."""
        method = self.stage.method
        names = ["loss", "aux", *method.stat_names(run.passes)]
        if method.halts:
            names += depth.names(method.max_depth())
        if run.number is None:
            names += [loss_of_pass(p) for p in run.passes if is_watched(p, method)]
        else:
            names += [Z_LOSS] if self.stage.z_loss else []
            names += [selection.PREFIX + name for name in selection.STATS] if self.stage.selection else []
        total = torch.zeros(len(names), dtype=torch.float64, device=self.groups.device)
        for sums in run.sums:
            total += torch.stack([sums[k].double() if k in sums else total.new_zeros(()) for k in names])
        if self.groups.is_last_stage and self.stage.config.sequence_parallel:
            # sums over this rank's tokens; losses are the same on all tensor ranks
            own = torch.tensor([not name.startswith("loss") for name in names], device=total.device)
            part = total * own
            dist.all_reduce(part, group=self.groups.tp)
            total = torch.where(own, part, total)
        self._share(total)
        values = dict(zip(names, total.tolist(), strict=True))
        z_loss = values.pop(Z_LOSS, 0.0)
        selected = {n: values.pop(selection.PREFIX + n) for n in selection.STATS if selection.PREFIX + n in values}
        out = StepOutput(values.pop("loss"), values.pop("aux"), tokens, values, z_loss=z_loss, selected=selected)
        if selected and self.stage.selection is not None:
            selected["selection_alpha"] = self.stage.selection.alpha
        if not tokens:
            out.loss, out.aux, out.stats, out.selected = math.nan, math.nan, {}, {}
        if run.number is None and method.halts:
            out.by_token = self._by_token(run)
        return out

    def _share(self, total: Tensor) -> None:
        """In place: summed over ranks with other tokens on the last stage, then broadcast to every pipeline stage."""
        if self.groups.is_last_stage:
            dist.all_reduce(total, group=self.groups.dp_cp)
        if self.groups.pp_size > 1:
            dist.broadcast(
                total, src=dist.get_global_rank(self.groups.pp, self.groups.pp_size - 1), group=self.groups.pp
            )

    def _by_token(self, run: Step) -> Tensor:
        total = torch.zeros(2, self.stage.vocab_size, device=self.groups.device)
        for part in run.by_token:
            total += part
        if self.groups.is_last_stage and self.stage.config.sequence_parallel:
            dist.all_reduce(total, group=self.groups.tp)
        self._share(total)
        return total.cpu()

    @torch.no_grad()
    def logits(self, ids_bn: Tensor) -> Tensor:
        """FP32 logits [b, n, vocab_size] of a one-process model."""
        out = self.readout(MicroBatch(ids_bn, torch.zeros_like(ids_bn), torch.ones(ids_bn.shape)))
        return self.stage.local_logits(out.hidden)[..., : self.stage.vocab_size].transpose(0, 1)

    @torch.no_grad()
    def readout(self, batch: MicroBatch) -> Readout:
        """What the last pass of a one-process model passes to the head, in evaluation."""
        return self._readout(batch)[0]

    @torch.no_grad()
    def token_losses(self, batch: MicroBatch) -> tuple[Readout, list[Tensor]]:
        """The readout of a one-process model, and the cross entropy of each token [n, b] if it were read out after
        each pass for which this has a meaning (`is_watched`); the last one is the model's own."""
        batch = _on_device(batch, self.groups.device)
        out, state = self._readout(batch, watched=True)
        found = [state.exit[name] for p in self.passes(None) if (name := loss_of_pass(p)) in state.exit]
        return out, [*found, self.stage.token_losses(out.hidden, batch)]

    def _readout(self, batch: MicroBatch, watched: bool = False) -> tuple[Readout, PassState]:
        assert self.groups.world_size == 1, "a complete readout exists only in a one-process model"
        batch = _on_device(batch, self.groups.device)
        state, out = PassState(), None
        for p in self.passes(None):
            look = watched and is_watched(p, self.stage.method)
            out = self.stage.run_pass(p, batch, out, state, None, look)  # type: ignore[arg-type]
        assert isinstance(out, Readout)
        return out, state
