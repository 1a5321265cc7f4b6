"""The parts of megatron-core's `optimizer.step()`, separated so that a decision can be made between norm and update."""

from __future__ import annotations

from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megaponder.checkpoint import optimizer_state
from megaponder.engine.zero import Updates


def gradient_norm(optimizer: Updates) -> float:
    """Hand the reduced gradients to the optimizer; their global norm before clipping, the same on every rank."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def update(optimizer: Updates, norm: float) -> None:
    """Clip the gradients, whose norm is `norm`, and take the step."""
    for part in optimizer_state.parts(optimizer):
        parameters, largest = part.get_parameters(), part.config.clip_grad
        if parameters and largest > 0:
            separate = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, largest, norm, separate)
    optimizer.step_with_ready_grads()
