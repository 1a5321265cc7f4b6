"""One optimizer step, which is taken only if its numbers are good."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megaponder.checkpoint import moments
from megaponder.data.batch import MicroBatch
from megaponder.engine.step import Engine, StepOutput
from megaponder.training.optimizer import drop_backbone_gradients

Judge = Callable[[float, float], bool]
"""Whether a step of this loss and gradient norm is taken: the same answer on every rank."""


def optimizer_step(
    engine: Engine,
    optimizer: MegatronOptimizer,
    batches: Sequence[MicroBatch],
    step: int,
    judge: Judge,
    enter: Callable[[str], None],
    method_only: bool = False,
) -> tuple[StepOutput, float]:
    """Forward, backward and, if `judge` agrees, update; returns the loss and the gradient norm before clipping.

    `method_only`: gradients of all but the method's own parameters are dropped.  `enter` is told each phase.
    """
    enter("forward_backward")
    engine.zero_grad()
    optimizer.zero_grad()
    out = engine.forward_backward(batches, step, train=True)
    if method_only:
        drop_backbone_gradients(engine.stage)
    enter("optimizer")
    # megatron-core's optimizer.step() in its own parts, with a decision between norm and update
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if judge(out.loss, norm):
        _clip(optimizer, norm)
        optimizer.step_with_ready_grads()
    return out, norm


def _clip(optimizer: MegatronOptimizer, norm: float) -> None:
    for part in moments.parts(optimizer):
        parameters, largest = part.get_parameters(), part.config.clip_grad
        if parameters and largest > 0:
            separate = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, largest, norm, separate)


@contextmanager
def whole_parameters(engine: Engine) -> Iterator[None]:
    """All parameters are up to date inside: with overlap_param_gather they arrive only during the next forward."""
    if not engine.ddp.ddp_config.overlap_param_gather:
        yield
        return
    engine.ddp.disable_forward_pre_hook()
    try:
        yield
    finally:
        engine.ddp.enable_forward_pre_hook()
