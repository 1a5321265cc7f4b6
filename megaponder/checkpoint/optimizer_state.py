"""Optimizer state in one form for every optimizer: tensors shaped like their parameters, under their names.

    optimizer.state.exp_avg.<parameter>      optimizer.state.exp_avg_sq.<parameter>
    optimizer.state.param.<parameter>        FP32 master weights, only where the parameter itself is not FP32

megatron-core's own state dicts differ between its FP32, BF16 and distributed optimizers (and its torch-Adam path needs
`step` tensors that its loader then shares between parameters).  Here only tensors are stored; Adam's step count is the
run's number of updates, and hyper-parameters come from the config.  So every optimizer loads what any other has saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

PREFIX = "optimizer.state."


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of a chain, without empty ones."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [o for o in chain if not getattr(o, "is_stub_optimizer", False)]


def has_masters(parameters: Iterator[Tensor]) -> bool:
    """Whether any parameter is kept in FP32 beside a narrower copy."""
    return any(p.dtype != torch.float32 for p in parameters)


def sharded_state(
    optimizer: MegatronOptimizer, model_state: dict[str, Any], metadata: dict[str, Any], loading: bool, masters: bool
) -> dict[str, Any]:
    """Sharded tensors of all moments and master weights; `model_state` maps names to sharded parameters.

    `masters` says whether the checkpoint has (loading) or gets (saving) master weights.  Loading masters from one that
    has none reads the parameters.
    """
    allocate(optimizer)
    result: dict[str, Any] = {}
    for i, part in enumerate(parts(optimizer)):
        if isinstance(part, DistributedOptimizer):
            found = part.sharded_param_state_fully_reshardable(model_state, loading, metadata)
        else:
            found = dict(enumerate(_plain(part, model_state)))
        result[str(i)] = {j: _named(tensors, loading, masters) for j, tensors in (found or {}).items()}
    return result


def load(optimizer: MegatronOptimizer, state: dict[str, Any], step: int) -> None:
    """Put loaded tensors in place and set Adam's step count.  Plain optimizers were loaded in place already."""
    for i, part in enumerate(parts(optimizer)):
        if isinstance(part, DistributedOptimizer):
            _drop_steps(part)
            with torch.no_grad():
                part.load_parameter_state_from_fully_reshardable(state[str(i)])
    set_step(optimizer, step)


def allocate(optimizer: MegatronOptimizer) -> None:
    """Zero moments for every parameter that has none yet (torch's Adam makes them in its first step)."""
    for part in parts(optimizer):
        inner = part.optimizer
        for p in parameters(inner):
            for name in moments(inner):
                if name not in inner.state[p]:
                    inner.state[p][name] = torch.zeros_like(p, dtype=torch.float32)
            if _counts_per_parameter(inner) and "step" not in inner.state[p]:
                inner.state[p]["step"] = _count(0)


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Adam's step count: per group in fused optimizers, one tensor a parameter in torch's."""
    for part in parts(optimizer):
        inner = part.optimizer
        if _counts_per_parameter(inner):
            for p in parameters(inner):
                inner.state[p]["step"] = _count(step)
        else:
            for group in inner.param_groups:
                group["step"] = step


def moments(inner: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the state: Adam's, or those that an optimizer names: Muon has the first alone."""
    return getattr(inner, "moments", ("exp_avg", "exp_avg_sq"))


def _counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _count(step: int) -> Tensor:
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def parameters(inner: torch.optim.Optimizer) -> list[Tensor]:
    """What the optimizer updates: under the distributed one this rank's shards, in BF16 runs their FP32 masters."""
    return [p for group in inner.param_groups for p in group["params"]]


def _drop_steps(part: DistributedOptimizer) -> None:
    """megatron-core copies every entry of the state from the checkpoint, which has no `step`."""
    for state in part.optimizer.state.values():
        state.pop("step", None)


def _plain(part: MegatronOptimizer, model_state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Sharded tensors of an FP32 or BF16 optimizer, one dict a parameter."""
    sharded = {id(s.data): s for s in nested_values(model_state) if isinstance(s, ShardedTensor | ShardedTensorFactory)}
    model_of: dict[int, Tensor] = {}
    for model_group, main_group in zip(
        getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", []), strict=True
    ):
        model_of |= {id(main): model for model, main in zip(model_group, main_group, strict=True)}
    for p in parameters(part.optimizer):
        like = sharded[id(model_of.get(id(p), p))]
        if getattr(part.optimizer, "shared_out", False):  # this rank alone has it, not the first of those alike
            like = replace(like, replica_id=(*like.replica_id[:-1], 0))
        tensors = {name: part.optimizer.state[p][name] for name in moments(part.optimizer)}
        if id(p) in model_of:
            tensors["param"] = p
        yield {
            name: make_sharded_optimizer_tensor(like, tensor.detach(), PREFIX + name)
            for name, tensor in tensors.items()
        }


def _named(tensors: dict[str, Any], loading: bool, masters: bool) -> dict[str, Any]:
    """Leave masters out, or read them from the parameters, where the checkpoint has none."""
    if masters or "param" not in tensors:
        return tensors
    if not loading:
        return {name: t for name, t in tensors.items() if name != "param"}
    master = tensors["param"]
    return tensors | {"param": replace(master, key=master.key.removeprefix(f"{PREFIX}param."))}
