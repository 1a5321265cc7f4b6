"""The parts of megatron-core's `optimizer.step()`, separated so that a decision can be made between norm and update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megaponder.checkpoint import optimizer_state
from megaponder.engine.step import Engine


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Hand the reduced gradients to the optimizer; their global norm before clipping, the same on every rank."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def update(optimizer: MegatronOptimizer, norm: float) -> None:
    """Clip the gradients, whose norm is `norm`, and take the step."""
    for part in optimizer_state.parts(optimizer):
        parameters, largest = part.get_parameters(), part.config.clip_grad
        if parameters and largest > 0:
            separate = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, largest, norm, separate)
    optimizer.step_with_ready_grads()


@contextmanager
def whole_parameters(engine: Engine) -> Iterator[None]:
    """All parameters are up to date inside: with overlap_param_gather they otherwise arrive during the next forward."""
    if not engine.ddp.ddp_config.overlap_param_gather:
        yield
        return
    engine.ddp.disable_forward_pre_hook()
    try:
        yield
    finally:
        engine.ddp.enable_forward_pre_hook()
