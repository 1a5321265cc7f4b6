"""Passes as the schedule sees them: model chunks without parameters, each a view of the same stage.

Chunk k of pipeline rank r is pass k of the layers that live on rank r.  megatron-core's interleaved schedule moves
chunk k's output of the last rank to chunk k+1 of the first rank, which is the feedback of a pondering model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from megaponder.config.in_flight import InFlight
from megaponder.data.batch import MicroBatch
from megaponder.engine.capture import Captures
from megaponder.engine.message import pack, rider_width, unpack
from megaponder.engine.objective import Objective
from megaponder.engine.stash import PassState, Stash
from megaponder.ponder.base import Flow, Pass


@dataclass
class Step:
    """State shared by the chunks of one optimizer (or evaluation) step."""

    passes: Sequence[Pass]
    batches: Sequence[MicroBatch]
    number: Tensor | None
    """Of the training step (scalar, FP64); None in evaluation."""
    tokens: Tensor
    """Valid targets in the global batch, the one denominator of every loss (scalar, FP32)."""
    flight: InFlight
    """How much this stage holds at once."""
    sums: list[dict[str, Tensor]] = field(default_factory=list)
    """Per micro-batch on the last stage: loss, auxiliary loss and the method's statistics, divided by `tokens`."""
    by_token: list[Tensor] = field(default_factory=list)
    """Per micro-batch on the last stage, in evaluation of a method with halting (`Objective.by_token`)."""
    scores: list[Tensor] = field(default_factory=list)
    """Per micro-batch on the last stage, of a forward that only asks for them (`Objective.scores_nb`)."""


class PassChunk(nn.Module):
    """One pass (PP > 1) or all passes (PP = 1) of the stage, with the interface that megatron-core's schedules
    expect."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, runner: Runner, config: TransformerConfig, step: Step, p: Pass | None, stash: Stash):
        super().__init__()
        self._runner, self._step, self._pass, self._stash = runner, step, p, stash
        self.config = copy.copy(config)
        self.vp_stage = p.index if p is not None and len(step.passes) > 1 else None
        self._next = 0
        self._message: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self._message = tensors[0]

    def forward(self) -> Tensor:
        """Run the next micro-batch; returns the message for the next stage or pass, or the loss."""
        index, self._next = self._next, self._next + 1  # every chunk sees the micro-batches in order
        message, self._message = self._message, None
        if self._pass is None:
            return self._all_passes(index)
        p = self._pass
        state = PassState() if p.index == 0 else self._stash.take(index)
        incoming = None if message is None else self._unpacked(message)
        out = self._runner(p, index, incoming, state, self._step)
        if isinstance(out, Objective):
            return self._runner.tied(p, self._objective(out), message)
        outgoing = self._runner.stage.earlier_layers.pack(pack(out), out.earlier).contiguous()
        if outgoing is message:  # the stage holds no layer of this pass
            outgoing = message.view_as(message)
        outgoing = self._runner.tied(p, outgoing, message)
        if not p.last:
            outgoing = self._stash.put(index, state, outgoing)
        # the schedule may free the data of sent tensors, so it must own them
        return make_viewless_tensor(outgoing, requires_grad=True, keep_graph=True)

    def _unpacked(self, message: Tensor) -> Flow:
        stage = self._runner.stage
        riders = stage.method.rider_channels
        message, earlier = stage.earlier_layers.unpack(message, rider_width(riders, message.dtype))
        return replace(unpack(message, riders), earlier=earlier)

    def _all_passes(self, index: int) -> Tensor:
        state, out = PassState(), None
        for p in self._step.passes:
            out = self._runner(p, index, out, state, self._step)  # type: ignore[arg-type]
        assert isinstance(out, Objective)
        return self._objective(out)

    def _objective(self, out: Objective) -> Tensor:
        if out.scores_nb is not None:
            self._step.scores.append(out.scores_nb)
            return out.total
        self._step.sums.append(out.sums)
        if out.by_token is not None:
            self._step.by_token.append(out.by_token)
        return out.total


class Runner:
    """One pass of one micro-batch through the stage: eager, or as a captured graph if there are captures."""

    def __init__(self, ddp: Callable[..., Any], stage: Any, captures: Captures | None):
        self.ddp, self.stage, self.captures = ddp, stage, captures
        self._cut: dict[Pass, bool] = {}
        self._anchor = torch.zeros((), requires_grad=True)

    def __call__(self, p: Pass, index: int, incoming: Flow | None, state: PassState, step: Step) -> Flow | Objective:
        batch = step.batches[index]
        if self.captures is not None and torch.is_grad_enabled():
            return self.captures.run(p, index, batch, incoming, state, step.number, step.tokens, step.flight)
        out: Flow | Objective = self.ddp(p, batch, incoming, state, step.number, step.tokens)
        return out

    def tied(self, p: Pass, outgoing: Tensor, message: Tensor | None) -> Tensor:
        """`outgoing` of a pass on this stage, so that its backward gives `message` a gradient in any case.

        The neighbour that sent the message waits for its gradient, and megatron-core's schedule sends none where there
        is none: in a pass without gradient, or in a method that detaches what it was given.  Whether that is so was
        seen when the pass first ran, eagerly.
        """
        if not torch.is_grad_enabled():
            return outgoing
        if p not in self._cut:
            self._cut[p] = not (outgoing.requires_grad and (message is None or reaches(outgoing, message)))
        return _Tie.apply(outgoing, self._anchor if message is None else message) if self._cut[p] else outgoing


class _Tie(torch.autograd.Function):
    """The output as it is; the message gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, message: Tensor) -> Tensor:
        ctx.like = message.new_empty(0), message.shape
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        like, shape = ctx.like
        return grad if ctx.needs_input_grad[0] else None, like.new_zeros(shape)


def reaches(output: Tensor, leaf: Tensor) -> bool:
    """Whether the backward of `output` arrives at a leaf."""
    left, seen = [output.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) is leaf:
            return True
        left += [following for following, _ in node.next_functions]
    return False
