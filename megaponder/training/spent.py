"""Training FLOPs of each step, from its own plan of passes and from the tokens that really took part in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megaponder.checkpoint.state import TrainState
from megaponder.config import eslm
from megaponder.config.schema import RunConfig
from megaponder.engine import depth
from megaponder.engine.step import StepOutput
from megaponder.plan.flops import StepFlops, micro_batches, step_flops
from megaponder.ponder.base import Method


class Spent:
    """Adds up what a run has spent; evaluation, saving and steps that a rollback took back are not in the sums."""

    def __init__(self, cfg: RunConfig, method: Method, world_size: int = 1):
        self._cfg, self._method, self._each = cfg, method, micro_batches(cfg, world_size)
        self._plans: dict[object, StepFlops] = {}

    def add(self, state: TrainState, tokens: int, out: StepOutput, seconds: float) -> TrainState:
        """`state`, the position after a step of `tokens` tokens, with its FLOPs and its seconds on this rank added.

        Where the method needs no computation for halted tokens, needed FLOPs count those that were active in a pass;
        executed ones do so only with `ponder.skip_halted`.
        """
        plan = self._plan(state.step)
        active = depth.active_shares(depth.metrics(out.stats, out.loss)) if self._method.skips else []
        shares = active if len(active) == len(plan.passes) else [1.0] * len(plan.passes)
        executed = shares if self._cfg.ponder.skip_halted else [1.0] * len(plan.passes)
        return replace(
            state,
            needed_flops=_plus(state.needed_flops, tokens * plan.needed_of(shares)),
            executed_flops=_plus(state.executed_flops, tokens * plan.executed_of(executed)),
            seconds=_plus(state.seconds, seconds),
        )

    @staticmethod
    def told(state: TrainState) -> dict[str, float]:
        """What a row of metrics tells of it; what is not known is absent."""
        found: Mapping[str, float | None] = {
            "needed_flops": state.needed_flops,
            "executed_flops": state.executed_flops,
            "training_seconds": state.seconds,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _plan(self, step: int) -> StepFlops:
        passes, selects = self._method.passes(self._cfg.train.seed, step), eslm.read(self._cfg.train.eslm)
        each = 1 if selects is not None and step <= selects.warmup else self._each
        if (passes, each) not in self._plans:
            self._plans[passes, each] = step_flops(self._cfg, self._method, step, each)
        return self._plans[passes, each]


def _plus(sum_: float | None, value: float) -> float | None:
    return None if sum_ is None else sum_ + value
