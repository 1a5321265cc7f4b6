"""An exponential moving average of the weights, in FP32, beside the optimizer that owns them.

    average <- decay * average + (1 - decay) * weight        after every update; it starts at the first weights

It follows what the optimizer updates: the FP32 masters of a BF16 run, and under the distributed optimizer this rank's
shard of them.  In a checkpoint it is one tensor a parameter, `optimizer.ema.<parameter>`, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from megaponder.checkpoint import optimizer_state
from megaponder.checkpoint.reader import EMA

_PLACE = "exp_avg"


class Ema:
    """The averages of all parameters that `optimizer` updates on this rank."""

    def __init__(self, optimizer: MegatronOptimizer, decay: float):
        self.optimizer, self._move = optimizer, get_ema_multi_avg_fn(decay)
        self._values: dict[Tensor, Tensor] = {}
        self.restart()

    def _inner(self) -> Iterator[Tensor]:
        for part in optimizer_state.parts(self.optimizer):
            yield from (p for group in part.optimizer.param_groups for p in group["params"])

    @torch.no_grad()
    def restart(self) -> None:
        """Begin at the present weights."""
        self._values = {p: p.detach().clone() for p in self._inner()}

    def values(self) -> list[Tensor]:
        """The averages, in the order of the optimizer's parameters."""
        return list(self._values.values())

    @torch.no_grad()
    def update(self) -> None:
        """After an update of the weights."""
        self._move(list(self._values.values()), list(self._values), None)

    def sharded_state(self, model_state: dict[str, Any], metadata: dict[str, Any], loading: bool) -> dict[str, Any]:
        """Sharded tensors by part of the optimizer and parameter."""
        moment = f"{optimizer_state.PREFIX}{_PLACE}."
        with self._as_moments():
            found = optimizer_state.sharded_state(self.optimizer, model_state, metadata, loading, masters=False)
        return {
            part: {i: replace(own[_PLACE], key=EMA + own[_PLACE].key.removeprefix(moment)) for i, own in state.items()}
            for part, state in found.items()
        }

    def load(self, state: dict[str, Any], optimizer: dict[str, Any], step: int) -> None:
        """Put loaded tensors in place; `optimizer` and `step`: what `optimizer_state.load` was given."""
        whole = {
            part: {i: own | {_PLACE: state[part][i]} for i, own in of_part.items()}
            for part, of_part in optimizer.items()
        }
        with self._as_moments():
            optimizer_state.load(self.optimizer, whole, step)

    @contextmanager
    def _as_moments(self) -> Iterator[None]:
        """The averages take the place of Adam's first moments: megatron-core gathers and shards no other state."""
        optimizer_state.allocate(self.optimizer)
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for part in optimizer_state.parts(self.optimizer):
            state = part.optimizer.state
            for group in part.optimizer.param_groups:
                for p in group["params"]:
                    self._values[p], state[p][_PLACE] = state[p][_PLACE], self._values[p]
