"""Loss on held-out data: the same sequences, in the same plan of passes, at every evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from megaponder.config.schema import RunConfig
from megaponder.data.stream import SampleStream
from megaponder.decoding.window import Window
from megaponder.engine import depth
from megaponder.training.stop import StopFlag

if TYPE_CHECKING:
    from megaponder.engine.step import Engine


@dataclass
class Evaluation:
    """Means over the valid tokens of all evaluation batches."""

    loss: float | None
    """None if no target counts."""
    stats: dict[str, float]
    """What `engine.depth.metrics` reports for the method."""
    by_token: Tensor | None = None
    """Of a method with halting: sum of depths and number of tokens of every vocabulary entry [2, V]."""


def evaluate(
    cfg: RunConfig, engine: Engine, valid: SampleStream, stop: StopFlag, alive: Callable[[], None]
) -> Evaluation | None:
    """Means over the valid tokens of eval_batches global batches; None if a request to stop interrupted it.

    `alive` is called before every batch.  Methods whose training draws its passes have a fixed plan here, so that the
    curve has one meaning; what decoding leaves out is left out.  Beside it, where the method has them: `soft_loss`,
    with everything weighed as in training, and `loss_at_random`, with the same shares of the passes spread at random.
    """
    method = engine.stage.method
    method.hard = True
    try:
        found = _means(cfg, engine, valid, stop, alive)
        if found is None or found.loss is None:
            return found
        if method.window is not None:
            method.at_random = _shares(found.stats, method.window)
            name = "loss_at_random"
        elif method.weighs:
            method.hard, name = False, "soft_loss"
        else:
            return found
        other = _means(cfg, engine, valid, stop, alive)
        if other is None or other.loss is None:
            return None
        found.stats[name] = other.loss
        return found
    finally:
        method.hard, method.at_random = False, None


def _shares(stats: dict[str, float], window: Window) -> list[float]:
    """Of the tokens that are asked at each open decision, the share that went on."""
    active = depth.active_shares(stats)
    return [active[k] / max(active[k - 1], 1e-9) for k in range(window.least, window.most)]


def _means(
    cfg: RunConfig, engine: Engine, valid: SampleStream, stop: StopFlag, alive: Callable[[], None]
) -> Evaluation | None:
    g, tokens = engine.groups, 0
    sums: dict[str, float] = {"loss": 0.0}
    by_token: Tensor | None = None
    for i in range(cfg.train.eval_batches):
        alive()
        batches = stop.wait(
            valid.fetch(i * cfg.train.global_batch, cfg.train.global_batch, cfg.train.micro_batch, g.dp_rank, g.dp_size)
        )
        if stop.agreed() or batches is None:
            return None
        out = engine.forward_backward(batches, 0, train=False)
        tokens += out.tokens
        if out.by_token is not None:
            by_token = out.by_token if by_token is None else by_token + out.by_token
        for name, mean in {} if not out.tokens else {"loss": out.loss, **out.stats}.items():
            sums[name] = sums.get(name, 0.0) + mean * out.tokens
    if not tokens:
        return Evaluation(None, {})
    means = {name: value / tokens for name, value in sums.items()}
    loss = means.pop("loss")
    return Evaluation(loss, depth.metrics(means, loss), by_token)
