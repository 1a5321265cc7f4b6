"""The engine on megatron-core: its DistributedDataParallel around the stage, and its pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megaponder.engine.capture import Captures
from megaponder.engine.chunks import PassChunk, Runner, Step
from megaponder.engine.groups import Groups
from megaponder.engine.message import rider_width
from megaponder.engine.model import PonderStage
from megaponder.engine.overlap import Arrivals
from megaponder.engine.p2p import PassCommunicator, receive_orders
from megaponder.engine.stash import Stash
from megaponder.engine.step import Engine
from megaponder.ponder.base import Pass


def _loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The schedule's loss function: the output already is the loss, divided by the global token count."""
    return output, torch.zeros((), dtype=torch.int, device=output.device), {}


def _forward(_: Any, chunk: PassChunk) -> tuple[Tensor, Any]:
    return chunk(), _loss_of


def _group_collection() -> ProcessGroupCollection:
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "dp_cp", "embd", "pos_embd"])


class Pipelined(Engine):
    """The stage is wrapped once, whatever the number of passes."""

    def __init__(
        self,
        stage: PonderStage,
        ddp: DistributedDataParallel,
        groups: Groups,
        seed: int,
        group_size: int | None,
        captures: Captures | None = None,
    ):
        super().__init__(stage, groups, seed, group_size, Runner(ddp, stage, captures))
        self.ddp = ddp
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

    def close(self) -> None:
        if self._runner.captures is not None:
            self._runner.captures.close()

    def zero_grad(self) -> None:
        """Clear the gradient buffers (the optimizer's own zero_grad clears its copies)."""
        self.ddp.zero_grad_buffer()

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        if not self.ddp.ddp_config.overlap_param_gather:
            yield
            return
        self.ddp.disable_forward_pre_hook()
        try:
            yield
        finally:
            self.ddp.enable_forward_pre_hook()

    def _begin(self, passes: Sequence[Pass]) -> None:
        if self._arrivals is not None:
            self._arrivals.expect(passes)
        if self._runner.captures is not None:
            self._runner.captures.begin_step(passes)

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

        more, stage = self.stage.earlier_layers.widths(passes), self.groups.pp_rank

        def shapes(order: list[tuple[Pass, bool]], sender: int) -> Iterator[list[int]]:
            for p, feedback in order:
                rows = n * (p.feedback_slots if feedback else p.slots) // shards
                yield [rows, b, width + more[p.index][sender]]

        forward, backward = receive_orders(passes, m, group, self.groups)
        # a gradient has the shape of what this stage sent
        return PassCommunicator(self.groups.pp, config, shapes(forward, stage - 1), shapes(backward, stage))
