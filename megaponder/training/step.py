"""One optimizer step, and what must hold of its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.core.optimizer import MegatronOptimizer

from megaponder.data.batch import MicroBatch
from megaponder.engine.step import Engine, StepOutput
from megaponder.errors import UserError
from megaponder.training.optimizer import drop_backbone_gradients


class NotFinite(UserError):  # noqa: N818  the sentence is for a user
    """Loss or gradient norm is NaN or infinite; raised on all ranks at the same step."""


def optimizer_step(
    engine: Engine, optimizer: MegatronOptimizer, batches: Sequence[MicroBatch], step: int, method_only: bool = False
) -> tuple[StepOutput, float]:
    """Forward, backward and update with a global batch; returns the loss and the gradient norm before clipping.

    `method_only`: gradients of all but the method's own parameters are dropped.
    """
    engine.zero_grad()
    optimizer.zero_grad()
    out = engine.forward_backward(batches, step, train=True)
    _require_finite("loss", out.loss, step)
    if method_only:
        drop_backbone_gradients(engine.stage)
    _, norm, _ = optimizer.step()
    _require_finite("gradient norm", float(norm), step)
    return out, float(norm)


def _require_finite(what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise NotFinite(
            f"Step {step}: the {what} is {value}; training stopped and no checkpoint was written after it. Continue "
            "from the newest one with a lower optimizer.lr, a longer warm-up or a smaller optimizer.clip_grad."
        )


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
