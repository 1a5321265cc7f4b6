"""Changes that would make a plan fit: single fields of the configuration, each computed by the planner itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megaponder.config.fields import value_of
from megaponder.config.rules import check
from megaponder.config.rules.case import divisors
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError
from megaponder.plan.memory import Job, fullest, settle_graphs

NODE = 8
"""GPUs of a node, beyond which tensor parallelism is slow."""


@dataclass(frozen=True)
class Change:
    """One field with another value, everything else unchanged."""

    field: str
    value: Any
    world_size: int
    """More than the plan's if a replica would need more GPUs."""
    total: int
    """Bytes of the fullest GPU."""
    fits: bool


def savings(job: Job, gpu_bytes: float) -> tuple[Change, ...]:
    """Legal changes that save memory: those that fit, the least costly first, then the others, largest saving first."""
    found, now = [], fullest(job)
    for field, values in _candidates(job.cfg):
        best: Change | None = None
        for value in values:
            cfg = _changed(job.cfg, field, value)
            world = max(job.world_size, cfg.parallel.replica)
            try:
                check(cfg, job.facts, world)
            except ConfigError:
                continue
            one = replace(job, cfg=cfg, world_size=world)
            total = fullest(replace(one, cfg=settle_graphs(one, gpu_bytes)) if job.te else one)
            if best is None or total < best.total:
                best = Change(field, value, world, total, total <= gpu_bytes)
            if best.fits:
                break
        if best is not None and best.total < now:
            found.append(best)
    return tuple(sorted(found, key=lambda c: (not c.fits, 0 if c.fits else c.total)))


def _candidates(cfg: RunConfig) -> Iterator[tuple[str, list[Any]]]:
    """Fields and the values to try, mildest first; values in use already save nothing and are dropped."""
    par, batch = cfg.parallel, cfg.train.micro_batch
    assert cfg.model.num_layers and cfg.model.num_heads
    yield "precision.cuda_graphs", ["auto", False]
    yield "train.micro_batch", [d for d in reversed(divisors(batch)) if d < batch]
    if cfg.zero is None:
        yield "parallel.distributed_optimizer", [True]
    else:
        yield "parallel.zero_stage", [stage for stage in (1, 2, 3) if stage > cfg.zero]
        yield "parallel.offload", ["optimizer", "weights"]
    yield "parallel.sequence", [True]
    yield "parallel.recompute", ["layer"]
    yield "parallel.recompute_layers", [None]
    yield "parallel.recompute_passes", [None]
    yield "parallel.tensor", [d for d in divisors(cfg.model.num_heads) if par.tensor < d <= NODE]
    yield "parallel.context", [d for d in (2, 4, NODE) if d > par.context]
    yield "parallel.pipeline", [d for d in divisors(cfg.model.num_layers) if par.pipeline < d <= 4 * par.pipeline]


def _changed(cfg: RunConfig, field: str, value: Any) -> RunConfig:
    section, _, name = field.rpartition(".")
    cfg = copy.deepcopy(cfg)
    setattr(value_of(cfg, section), name, value)
    return cfg
