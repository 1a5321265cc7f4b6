"""Loss on held-out data: the same sequences, in the same plan of passes, at every evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaponder.config.schema import RunConfig
from megaponder.data.stream import SampleStream
from megaponder.training.stop import StopFlag

if TYPE_CHECKING:
    from megaponder.engine.step import Engine


def evaluate(cfg: RunConfig, engine: Engine, valid: SampleStream, stop: StopFlag) -> float | None:
    """Mean loss over the valid tokens of eval_batches global batches; None if a signal has cut it short.

    Plans that are drawn anew in every step are evaluated at step 0, so that the curve has one meaning.
    """
    g, loss, tokens = engine.groups, 0.0, 0
    for i in range(cfg.train.eval_batches):
        if stop.agreed():
            return None
        batches = valid.micro_batches(
            i * cfg.train.global_batch, cfg.train.global_batch, cfg.train.micro_batch, g.dp_rank, g.dp_size
        )
        out = engine.forward_backward(batches, 0, train=False)
        loss, tokens = loss + out.loss * out.tokens, tokens + out.tokens
    return loss / max(1, tokens)
