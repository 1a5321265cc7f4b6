"""Engines: the one place that asks which of them trains.

An engine is an `engine.step.Engine`, which runs a global batch forward and backward, and what updates the weights, with
the functions of megatron-core's optimizers that `training.step` calls.  Both write and read the same checkpoints.
"""

from __future__ import annotations

from megaponder.checkpoint import zero_state
from megaponder.config.schema import RunConfig
from megaponder.engine.build import build_engine, build_stage
from megaponder.engine.groups import Groups
from megaponder.engine.step import Engine
from megaponder.engine.zero import Updates, ZeroEngine
from megaponder.monitor.start_end import starting
from megaponder.ponder.base import Method
from megaponder.training.optimizer import build_optimizer, leave_compiler_alone


def build(cfg: RunConfig, method: Method, groups: Groups) -> tuple[Engine, Updates]:
    """The engine of `train.engine`, and its optimizer."""
    if cfg.train.engine == "deepspeed":
        return _deepspeed(cfg, method, groups)
    engine = build_engine(cfg, method, groups)
    starting("optimizer")
    return engine, build_optimizer(cfg, engine.ddp)


def _deepspeed(cfg: RunConfig, method: Method, groups: Groups) -> tuple[Engine, Updates]:
    leave_compiler_alone()
    stage = build_stage(cfg, method, groups)
    known = zero_state.entries(stage)  # names and shapes, while parameters are whole
    starting("optimizer")
    engine = ZeroEngine(cfg, stage, groups)
    engine.optimizer.entries = known
    return engine, engine.optimizer
