"""Loss on held-out data: the same sequences, in the same plan of passes, at every evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megaponder.config.schema import RunConfig
from megaponder.data.stream import SampleStream
from megaponder.engine import depth
from megaponder.training.stop import StopFlag

if TYPE_CHECKING:
    from megaponder.engine.step import Engine


RARE = 0.01
"""Share of a decision's tokens that is too small for a comparison."""


@dataclass
class Evaluation:
    """Means over the valid tokens of all evaluation batches."""

    loss: float | None
    """None if no target counts."""
    stats: dict[str, float]
    """What `engine.depth.metrics` reports for the method."""
    by_token: Tensor | None = None
    """Of a method with halting: sum of depths and number of tokens of every vocabulary entry [2, V]."""
    sets: dict[str, float] = field(default_factory=dict)
    """The loss of each named set of held-out data."""


def evaluate(
    cfg: RunConfig,
    engine: Engine,
    valid: Mapping[str, SampleStream],
    stop: StopFlag,
    alive: Callable[[], None],
    every_depth: bool = False,
) -> Evaluation | None:
    """Means over the valid tokens of eval_batches global batches of each set of held-out data; None if a request to
    stop interrupted it.

    `alive` is called before every batch.  Methods whose training draws its passes have a fixed plan here, so that the
    curve has one meaning; what decoding leaves out is left out.  Beside it, where the method has them: `soft_loss`,
    with everything weighed as in training, and `loss_at_random`, with the same shares of the passes spread at random.
    `every_depth`, for a method with halting: also `loss_pass0`, `loss_pass1`, ..., with all tokens stopping there.
    """
    method = engine.stage.method
    others: dict[str, float] = {}

    def also(name: str) -> bool:
        other = _means(cfg, engine, valid, stop, alive)
        if other is None or other.loss is None:
            return False
        others[name] = other.loss
        return True

    method.hard = True
    try:
        found = _means(cfg, engine, valid, stop, alive)
        if found is None or found.loss is None:
            return found
        if every_depth and method.halts:
            for passes in range(1, method.max_depth() + 1):
                method.forced = torch.tensor(passes, device=engine.groups.device)
                if not also(f"loss_pass{passes - 1}"):
                    return None
            method.forced = None
        if method.chooses:
            method.at_random = depth.shares_that_go_on(found.stats, method.window)
            # with all tokens at one depth there is nothing that chance could decide otherwise
            if any(RARE < share < 1 - RARE for share in method.at_random) and not also("loss_at_random"):
                return None
        elif method.weighs:
            method.hard = False
            if not also("soft_loss"):
                return None
        found.stats |= others
        return found
    finally:
        method.hard, method.at_random, method.forced = False, None, None


def _means(
    cfg: RunConfig, engine: Engine, valid: Mapping[str, SampleStream], stop: StopFlag, alive: Callable[[], None]
) -> Evaluation | None:
    tokens, sums, by_token = 0, {"loss": 0.0}, None
    sets: dict[str, float] = {}
    for name, stream in valid.items():
        found = _sums(cfg, engine, stream, stop, alive)
        if found is None:
            return None
        counted, own, of_tokens = found
        tokens += counted
        for key, value in own.items():
            sums[key] = sums.get(key, 0.0) + value
        if of_tokens is not None:
            by_token = of_tokens if by_token is None else by_token + of_tokens
        if name and counted:
            sets[name] = own["loss"] / counted
    if not tokens:
        return Evaluation(None, {})
    means = {name: value / tokens for name, value in sums.items()}
    loss = means.pop("loss")
    return Evaluation(loss, depth.metrics(means, loss), by_token, sets)


def _sums(
    cfg: RunConfig, engine: Engine, stream: SampleStream, stop: StopFlag, alive: Callable[[], None]
) -> tuple[int, dict[str, float], Tensor | None] | None:
    """Valid tokens of one set, the sums of loss and statistics over them, and what `by_token` is of them."""
    g, tokens = engine.groups, 0
    sums: dict[str, float] = {"loss": 0.0}
    by_token: Tensor | None = None
    for i in range(cfg.train.eval_batches):
        alive()
        batches = stop.wait(
            stream.fetch(
                i * cfg.train.global_batch, cfg.train.global_batch, cfg.train.micro_batch, g.dp_rank, g.dp_size
            )
        )
        if stop.agreed() or batches is None:
            return None
        out = engine.forward_backward(batches, 0, train=False)
        tokens += out.tokens
        if out.by_token is not None:
            by_token = out.by_token if by_token is None else by_token + out.by_token
        for name, mean in {} if not out.tokens else {"loss": out.loss, **out.stats}.items():
            sums[name] = sums.get(name, 0.0) + mean * out.tokens
    return tokens, sums, by_token
