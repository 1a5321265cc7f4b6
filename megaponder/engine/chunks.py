"""Passes as the schedule sees them: model chunks without parameters, all views of one stage.

Chunk k of pipeline rank r is pass k of the layers that live on rank r.  megatron-core's interleaved schedule moves
chunk k's output of the last rank to chunk k+1 of the first rank, which is the feedback of a pondering model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from megaponder.data.batch import MicroBatch
from megaponder.engine import depth
from megaponder.engine.message import pack, unpack
from megaponder.engine.stash import PassState, Stash
from megaponder.engine.tools import StageExitTools
from megaponder.ponder.base import Pass, Readout


@dataclass
class Step:
    """One optimizer (or evaluation) step: what its chunks share."""

    passes: Sequence[Pass]
    batches: Sequence[MicroBatch]
    number: int | None
    """Of the training step; None in evaluation."""
    tokens: Tensor
    """Valid targets in the global batch, the one denominator of every loss (scalar, FP32)."""
    sums: list[dict[str, Tensor]] = field(default_factory=list)
    """Per micro-batch on the last stage: loss, auxiliary loss and the method's statistics, divided by `tokens`."""


class PassChunk(nn.Module):
    """One pass (PP > 1) or all passes (PP = 1) of the stage, in the form that megatron-core's schedules call."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, ddp: nn.Module, stage: Any, config: TransformerConfig, step: Step, p: Pass | None, stash: Stash):
        super().__init__()
        # in a list: the stage must not become a submodule of each of its passes
        self._shared = [ddp, stage]
        self._step, self._pass, self._stash = step, p, stash
        self.config = copy.copy(config)
        self.vp_stage = p.index if p is not None and len(step.passes) > 1 else None
        self._next = 0
        self._message: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self._message = tensors[0]

    def set_is_first_microbatch(self) -> None:
        """Called by the schedule once a step; Transformer Engine then quantises its weights anew, for all passes."""
        first = self._pass is None or self._pass.index == 0
        if first:
            for module in self._shared[1].modules():
                if hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = True

    def forward(self) -> Tensor:
        """Run the next micro-batch; returns the message for the next stage or pass, or the loss."""
        ddp, stage = self._shared
        index, self._next = self._next, self._next + 1  # every chunk sees the micro-batches in order
        batch = self._step.batches[index]
        message, self._message = self._message, None
        if self._pass is None:
            return self._all_passes(ddp, stage, batch)
        p = self._pass
        state = PassState() if p.index == 0 else self._stash.take(index)
        incoming = None if message is None else unpack(message, stage.method.rider_channels)
        out = ddp(p, batch, incoming, state, self._step.number)
        if isinstance(out, Readout):
            return self._loss(stage, out, batch)
        outgoing = pack(out).contiguous()
        if not p.last:
            outgoing = self._stash.put(index, state, outgoing)
        # the schedule may free the data of what it has sent, so it must own it
        return make_viewless_tensor(outgoing, requires_grad=True, keep_graph=True)

    def _all_passes(self, ddp: nn.Module, stage: Any, batch: MicroBatch) -> Tensor:
        state, out = PassState(), None
        for p in self._step.passes:
            out = ddp(p, batch, out, state, self._step.number)
        assert isinstance(out, Readout)
        return self._loss(stage, out, batch)

    def _loss(self, stage: Any, out: Readout, batch: MicroBatch) -> Tensor:
        """Share of this micro-batch in the mean loss of the global batch."""
        losses = stage.token_losses(out.hidden, batch)
        tools = StageExitTools(stage, batch, self._step.number)
        lm = (losses * batch.loss_mask_bn.t()).sum() / self._step.tokens
        total, sums = lm, {"loss": lm.detach()}
        if out.aux is not None:
            aux = out.aux.float() / self._step.tokens
            total = total + aux
            sums["aux"] = aux.detach()
        stats = dict(out.stats)
        if out.depth is not None:
            own = tools.mine(losses.detach())
            stats |= depth.sums(out.depth, own, tools.valid_sb, out.gates, stage.method.max_depth())
        for name, value in stats.items():
            sums[name] = value.detach().float() / self._step.tokens
        self._step.sums.append(sums)
        return total
