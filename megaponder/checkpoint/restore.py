"""Loading a checkpoint into a running model: everything (resume) or only the weights (a new run)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule

from megaponder.checkpoint import optimizer_state, reader, rng, routers, scales, zero_state
from megaponder.checkpoint.ema import Ema
from megaponder.checkpoint.model_state import layout, metadata, sharded_state
from megaponder.checkpoint.state import Contents, TrainState, load_state
from megaponder.engine.zero import Updates, ZeroOptimizer
from megaponder.errors import UserError
from megaponder.ponder.base import PARAMETER_PREFIX
from megaponder.ranks import gather, on_first_rank

log = logging.getLogger(__name__)
Shapes = dict[str, tuple[int, ...]]


def _other_model(path: Path, difference: str) -> UserError:
    """What to raise for a checkpoint whose tensors do not match the model's."""
    why = "it was saved from a different model, or with other options of its method"
    return UserError(f"Checkpoint {path} cannot be used: {difference}; {why}.")


def resume(path: Path, stage: MegatronModule, optimizer: Updates, ema: Ema | None = None) -> TrainState:
    """Load parameters, optimizer state and, on the layout that saved them, random states.  All ranks call this.

    `ema` begins anew if the checkpoint has none.
    """
    state, contents = on_first_rank(lambda: load_state(path))
    names = _stored(path)
    model = _described(stage, optimizer)
    _refuse_absent(path, model, names)
    _refuse_other_shapes(path, model, names)
    if left := _not_wanted(model, names):
        raise _other_model(path, f"this model has no parameter for its {_some(left)}")
    if isinstance(optimizer, ZeroOptimizer):
        _refuse_absent(path, zero_state.described(optimizer, moments=True), names)
        zero_state.load(path, optimizer, names, state.updates)
    else:
        _resume(path, stage, optimizer, ema, names, contents, state.updates)
    if contents.layout == layout():
        rng.load(_load(path, rng.sharded_state()))
    else:
        log.info("random states were not loaded: they belong to another layout %s", contents.layout)
    return state


def _resume(
    path: Path,
    stage: MegatronModule,
    optimizer: MegatronOptimizer,
    ema: Ema | None,
    names: Shapes,
    contents: Contents,
    updates: int,
) -> None:
    """What megatron-core's optimizers own, and what depends on it."""
    model = sharded_state(stage)
    if contents.masters and not optimizer_state.has_masters(stage.parameters()):
        # the saving run was BF16 and this one is FP32: its master weights are more precise
        _rename(model, lambda key: f"{optimizer_state.PREFIX}param.{key}", names)
    _load_model(path, stage, model)
    model = sharded_state(stage)
    wanted = optimizer_state.sharded_state(optimizer, model, metadata(), loading=True, masters=contents.masters)
    _refuse_absent(path, wanted, names)
    fp8 = _scales(stage.fp8, names)
    averages = _averages(ema, model, names)
    loaded = _load(path, {"optimizer": wanted} | averages | ({"fp8": fp8} if fp8 else {}))
    optimizer_state.load(optimizer, loaded["optimizer"], updates)
    if ema is not None and averages:
        ema.load(loaded["ema"], loaded["optimizer"], updates)
    elif ema is not None:
        ema.restart()
    if fp8:
        stage.fp8.load_scales(loaded["fp8"])


def _described(stage: MegatronModule, optimizer: Updates | None) -> dict[str, Any]:
    """Names and shapes of what this rank needs of the model."""
    return zero_state.described(optimizer) if isinstance(optimizer, ZeroOptimizer) else sharded_state(stage)


def load(
    path: Path, stage: MegatronModule, optimizer: Updates | None = None, ema: Ema | None = None
) -> tuple[list[str], list[str]]:
    """Load the weights only; returns the method's parameters that the checkpoint lacks and those that the model lacks.

    The first keep their initial values, the second are left out.  A layer may have more routers than the checkpoint
    (`checkpoint.routers`).  Call it before the first step; `optimizer` then takes
    its master weights from the loaded parameters, and `ema` begins with them.
    """
    names = _stored(path)
    model = routers.as_stored(_described(stage, optimizer), names)
    lacking = _refuse_absent(path, model, names, may_lack=PARAMETER_PREFIX)
    _refuse_other_shapes(path, model, names)
    left = _not_wanted(model, names)
    if hard := [k for k in left if not k.startswith(PARAMETER_PREFIX)]:
        raise _other_model(path, f"this model has no parameter for its {_some(hard)}")
    if isinstance(optimizer, ZeroOptimizer):
        zero_state.load(path, optimizer, names, None, lacking)
        return lacking, left
    _load_model(path, stage, {k: v for k, v in model.items() if getattr(v, "key", k) not in lacking})
    if optimizer is not None:
        optimizer.reload_model_params()
    if ema is not None:
        ema.restart()
    return lacking, left


def _load(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    with reader.reading(path):
        return dist_checkpointing.load(wanted, str(path))


def _load_model(path: Path, stage: MegatronModule, model: dict[str, Any]) -> None:
    loaded = _load(path, {"model": model})["model"]
    with torch.no_grad():
        own = stage.state_dict(keep_vars=True)
        for name, value in loaded.items():
            if isinstance(value, torch.Tensor):
                if name.endswith(routers.ENDS):
                    value = routers.grown(value, own[name], stage.balance.options.experts)
                own[name].copy_(value)


def _averages(ema: Ema | None, model: dict[str, Any], names: Shapes) -> dict[str, Any]:
    """What to read for the moving average: nothing if the saving run had none."""
    if ema is None or not any(name.startswith(reader.EMA) for name in names):
        return {}
    return {"ema": ema.sharded_state(model, metadata(), loading=True)}


def _scales(fp8: scales.Scales | None, names: Shapes) -> dict[str, ShardedTensor]:
    """All FP8 scales, or none if the saving run had different ones: the canary's runs then fill them."""
    if fp8 is None or not any(name.startswith(scales.PREFIX) for name in names):
        return {}
    fp8.allocate()
    wanted = scales.sharded_state(fp8)
    other = _of_all_ranks([s.key for s in wanted.values() if names.get(s.key) != tuple(s.global_shape)])
    if other:
        log.info("scales of FP8 were not loaded: the checkpoint has no such %s", _some(other))
    return {} if other else wanted


def _stored(path: Path) -> Shapes:
    """Names and shapes of everything in the checkpoint, read by one rank.

    This must run before megatron-core, which unpickles the index without restrictions.
    """
    return on_first_rank(lambda: reader.shapes(path))


def _some(names: list[str]) -> str:
    return f"tensor {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _keys(state: dict[str, Any]) -> list[str]:
    return [s.key for s in nested_values(state) if isinstance(s, ShardedTensor | ShardedTensorFactory)]


def _of_all_ranks(mine: list[str]) -> list[str]:
    return sorted({name for said in gather(mine) for name in said.value})


def _refuse_absent(path: Path, wanted: dict[str, Any], names: Shapes, may_lack: str = "") -> list[str]:
    """UserError on all ranks if the checkpoint lacks a tensor that any rank needs; returns those that may be
    missing."""
    absent = _of_all_ranks([k for k in _keys(wanted) if k not in names])
    if hard := [k for k in absent if not (may_lack and k.startswith(may_lack))]:
        raise _other_model(path, f"it has no {_some(hard)}")
    return absent


def _refuse_other_shapes(path: Path, wanted: dict[str, Any], names: Shapes) -> None:
    """UserError on all ranks if a tensor of the checkpoint has a different shape; padding of the vocabulary may
    differ."""
    other = _of_all_ranks(
        [
            f"{s.key} with shape {list(names[s.key])} where this model has {list(s.global_shape)}"
            for s in nested_values(wanted)
            if isinstance(s, ShardedTensor) and not s.allow_shape_mismatch
            if s.key in names and names[s.key] != tuple(s.global_shape)
        ]
    )
    if other:
        raise _other_model(path, f"it has {_some(other)}")


def _not_wanted(wanted: dict[str, Any], names: Shapes) -> list[str]:
    """Parameters of the checkpoint that no rank uses."""
    taken = set(_of_all_ranks(_keys(wanted)))
    return sorted(k for k in names if k not in taken and not k.startswith(reader.BESIDES))


def _rename(state: dict[str, Any], rule: Any, names: Shapes) -> None:
    def renamed(s: Any) -> Any:
        if isinstance(s, ShardedTensor | ShardedTensorFactory) and rule(s.key) in names:
            return replace(s, key=rule(s.key))
        return s

    dict_list_map_inplace(renamed, state)
