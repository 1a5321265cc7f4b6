"""Forward and backward of one global batch through megatron-core's schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megaponder.backbone.context import part_of
from megaponder.config.in_flight import in_flight
from megaponder.config.rules.layout import choose_group
from megaponder.data.batch import MicroBatch, tensors_of
from megaponder.engine import depth, selection
from megaponder.engine.capture import Captures
from megaponder.engine.chunks import PassChunk, Runner, Step
from megaponder.engine.groups import Groups
from megaponder.engine.message import rider_width
from megaponder.engine.model import Z_LOSS, PonderStage, is_watched, loss_of_pass
from megaponder.engine.overlap import Arrivals
from megaponder.engine.p2p import PassCommunicator, receive_orders
from megaponder.engine.stash import PassState, Stash
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


def _loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The schedule's loss function: the output already is the loss, divided by the global token count."""
    return output, torch.zeros((), dtype=torch.int, device=output.device), {}


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


def _forward(_: Any, chunk: PassChunk) -> tuple[Tensor, Any]:
    return chunk(), _loss_of


def _group_collection() -> ProcessGroupCollection:
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "dp_cp", "embd", "pos_embd"])


class Engine:
    """One pipeline rank: its stage, wrapped once by DistributedDataParallel, and the schedules that run it."""

    def __init__(
        self,
        stage: PonderStage,
        ddp: DistributedDataParallel,
        groups: Groups,
        seed: int,
        group_size: int | None,
        captures: Captures | None = None,
    ):
        self.stage, self.ddp, self.groups = stage, ddp, groups
        self._runner = Runner(ddp, stage, captures)
        self._seed, self._group_size = seed, group_size
        self.own_time = Stopwatch(groups.device)
        """Time of the last training step, from its first forward up to the reduction of gradients."""
        config = stage.config
        config.finalize_model_grads_func = self._finalize
        self._arrivals: Arrivals | None = None
        if ddp.ddp_config.overlap_grad_reduce:
            config.no_sync_func = ddp.no_sync
            if groups.pp_size > 1:
                self._arrivals = Arrivals(ddp)

    def _finalize(self, *_: Any, **__: Any) -> None:
        """Reduce gradients: one DDP, whatever the number of passes; no rescaling."""
        self.own_time.stop()
        finalize_model_grads([self.ddp], None, pg_collection=_group_collection())

    def fp8_amax(self) -> dict[str, float]:
        """Row values `fp8_amax_...` of the last training step (`Fp8.amax`)."""
        found = self.stage.fp8.amax() if self.stage.fp8 else {}
        return {f"fp8_amax_{tensor}": value for tensor, value in found.items()}

    def close(self) -> None:
        """Release whatever would keep the process groups alive."""
        if self._runner.captures is not None:
            self._runner.captures.close()

    def zero_grad(self) -> None:
        """Clear the gradient buffers (the optimizer's own zero_grad clears its copies)."""
        self.ddp.zero_grad_buffer()

    def passes(self, step: int | None) -> Sequence[Pass]:
        """The method's plan for a training step, or for evaluation (None): the same on every rank."""
        return self.stage.method.passes(self._seed, step)

    def forward_backward(self, batches: Sequence[MicroBatch], step: int, train: bool) -> StepOutput:
        """Run this rank's micro-batches of a global batch: whole sequences, of which it takes its part.

        With `train`, every parameter's `main_grad` afterwards holds the gradient of the mean loss over the global
        batch's valid tokens, reduced over all groups (its shard, under the distributed optimizer).
        """
        batches = [_on_device(b, self.groups.device) for b in batches]
        each = torch.stack([b.loss_mask_bn.sum() for b in batches]).float()
        counts = torch.stack([each.sum(), (each == 0).sum()])
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
            self.stage.balance.begin(passes, run.tokens, train)
        if train and self._arrivals is not None:
            self._arrivals.expect(passes)
        if train and self._runner.captures is not None:
            self._runner.captures.begin_step(passes)
        with torch.set_grad_enabled(train):
            self._schedule(run, forward_only=not train)
        if self.stage.fp8 and train:
            self.stage.fp8.end_step()
        valid, empty = counts.tolist()
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

    def _schedule(self, run: Step, forward_only: bool) -> None:
        stash, config, passes, batches = Stash(), self.stage.config, run.passes, run.batches
        b, n = batches[0].ids_bn.shape  # of this rank
        common = dict(
            forward_step_func=_forward,
            num_microbatches=len(batches),
            seq_length=n * self.groups.cp_size,
            micro_batch_size=b,
            forward_only=forward_only,
            pg_collection=_group_collection(),
        )
        if self.groups.pp_size == 1:
            chunk = PassChunk(self._runner, config, run, None, stash)
            forward_backward_no_pipelining(data_iterator=None, model=chunk, **common)
            return
        chunks = [PassChunk(self._runner, config, run, p, stash) for p in passes]
        group = self._group(len(batches))
        for chunk in chunks:
            c = chunk.config
            c.variable_seq_lengths = True  # asks PassCommunicator for each shape; nothing is exchanged
            if len(passes) > 1:
                c.virtual_pipeline_model_parallel_size = len(passes)
                c.microbatch_group_size_per_vp_stage = group
                # batched messages would cross with PP=2: next and previous rank are the same
                c.overlap_p2p_comm, c.batch_p2p_comm = True, False
        p2p = self._communicator(chunks[0].config, passes, len(batches), group, n, b)
        if len(passes) == 1:
            forward_backward_pipelining_without_interleaving(
                data_iterator=None, model=chunks[0], p2p_communicator=p2p, **common
            )
        else:
            forward_backward_pipelining_with_interleaving(
                data_iterator=[None] * len(chunks), model=chunks, p2p_communicator=p2p, **common
            )
        assert not len(stash), "a pass left state that no later pass used"

    def _communicator(
        self, config: Any, passes: Sequence[Pass], m: int, group: int, n: int, b: int
    ) -> PassCommunicator:
        width = config.hidden_size + rider_width(self.stage.method.rider_channels, config.pipeline_dtype)
        shards = self.groups.tp_size if config.sequence_parallel else 1

        more, stage = self.stage.depth.widths(passes), self.groups.pp_rank

        def shapes(order: list[tuple[Pass, bool]], sender: int) -> Iterator[list[int]]:
            for p, feedback in order:
                rows = n * (p.feedback_slots if feedback else p.slots) // shards
                yield [rows, b, width + more[p.index][sender]]

        forward, backward = receive_orders(passes, m, group, self.groups)
        # a gradient has the shape of what this stage sent
        return PassCommunicator(self.groups.pp, config, shapes(forward, stage - 1), shapes(backward, stage))

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
