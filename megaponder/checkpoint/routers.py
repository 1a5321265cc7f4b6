"""Weights of a mixture with fewer routers than the model has: what a run with a router for each pass may start from.

Steps beyond a checkpoint's routers take its last one, so further routers start as copies of that and the model computes
what it did.  The other way there is no such model: neither one of several routers nor their mean chooses as all do.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megaponder.decoding.moe_options import read
from megaponder.errors import ConfigError

ENDS = (".router.weight", ".router.expert_bias")


def as_stored(model: dict[str, Any], names: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """A stage's sharded state with room for as many routers as the checkpoint has, if these are fewer."""
    found = dict(model)
    for name, s in model.items():
        if not (isinstance(s, ShardedTensor) and s.key.endswith(ENDS) and s.key in names):
            continue
        rows, *rest = names[s.key]
        if rows < s.global_shape[0] and tuple(rest) == tuple(s.global_shape[1:]) and s.data is not None:
            data = torch.empty_like(s.data[:rows])
            found[name] = replace(ShardedTensor.from_rank_offsets(s.key, data), replica_id=s.replica_id)
    return found


def grown(stored: Tensor, own: Tensor, experts: int) -> Tensor:
    """Rows of routers as a model has them: those that were stored, and then the last one for each further router."""
    if len(stored) == len(own):
        return stored
    more = (len(own) - len(stored)) // experts
    return torch.cat([stored, *[stored[-experts:]] * more])


def told(then: dict[str, Any] | None, now: dict[str, Any] | None, checkpoint: Path) -> str | None:
    """A sentence if two values of `model.moe` differ in their routers alone and weights of the one can start the other.

    ConfigError if they cannot; None if something else differs.
    """
    old, new = read(then), read(now)
    if old is None or new is None or replace(old, routers=new.routers) != new:
        return None
    before, after = old.router_count, new.router_count
    if after < before:
        rule = (
            f"checkpoint {checkpoint} has {before} routers in a layer, which choose differently, and neither one of "
            "them nor their mean can take the place of all"
        )
        raise ConfigError("model.moe.routers", new.routers, rule, f"use {before}")
    if after == before:
        return ""
    if before == 1:
        return f"Each of the {after} routers in a layer starts as the checkpoint's one."
    return f"Of the {after} routers in a layer, those after {before} start as the last of the checkpoint's."
