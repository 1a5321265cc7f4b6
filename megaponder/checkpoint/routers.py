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

from megaponder.decoding.moe_options import Experts
from megaponder.errors import ConfigError

BALANCING = ("aux_weight", "bias_rate")
"""Options of `model.moe` that only move the load of experts while a model is trained."""
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


def balanced_as(then: Experts, now: Experts) -> Experts:
    """`then` with the coefficients of `now` by which training balances the load: they are no part of the model, as long
    as neither of the two has biases that the other lacks."""
    biased = bool(then.bias_rate) == bool(now.bias_rate)
    return replace(then, aux_weight=now.aux_weight, bias_rate=now.bias_rate if biased else then.bias_rate)


def describe_growth(old: Experts, new: Experts, checkpoint: Path) -> str | None:
    """A sentence if two mixtures differ in their routers alone and weights of the one can start the other.

    ConfigError if they cannot; None if something else differs.
    """
    if replace(old, routers=new.routers) != new:
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
