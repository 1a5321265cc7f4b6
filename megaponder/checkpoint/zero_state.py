"""The state of a run on DeepSpeed, in the form that checkpoints of megatron-core's engine have.

ZeRO cuts parameters and moments at any place, and no checkpoint shows where: each tensor is gathered by itself, and one
rank keeps it on the CPU and writes it, so that a rank holds a share of the state besides its own.  Readers take their
shards from whole tensors, a few at a time.  So a run may go on with the other engine, any stage and number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megaponder.checkpoint import model_state, optimizer_state, reader, rng
from megaponder.engine.zero import MOMENTS, ZeroOptimizer

AT_ONCE = 1 << 30
"""Bytes that are read at once."""


@dataclass(frozen=True)
class Entry:
    """A parameter or buffer of the model."""

    key: str
    """Its name in checkpoints."""
    tensor: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor: of a sharded parameter nothing else tells."""
    padded: bool
    """The number of rows may differ: they pad the vocabulary."""

    @property
    def trained(self) -> bool:
        return self.tensor.requires_grad


def entries(stage: MegatronModule) -> list[Entry]:
    """All of them; call it before DeepSpeed shards the parameters."""
    own = stage.state_dict(keep_vars=True)
    return [
        Entry(s.key, own[name], tuple(own[name].shape), getattr(s, "allow_shape_mismatch", False))
        for name, s in model_state.sharded_state(stage).items()
        if isinstance(own[name], Tensor)
    ]


def described(optimizer: ZeroOptimizer, moments: bool = False) -> dict[str, ShardedTensor]:
    """Names and shapes of what a checkpoint must have of the model, or of its moments."""
    prefixes = [f"{optimizer_state.PREFIX}{name}." for name in MOMENTS] if moments else [""]
    return {
        prefix + e.key: ShardedTensor.from_rank_offsets(
            prefix + e.key, torch.empty(e.shape, device="meta"), allow_shape_mismatch=e.padded
        )
        for e in optimizer.entries
        for prefix in prefixes
        if e.trained or not moments
    }


def tensors(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """What this rank writes: whole tensors, of which each is on one rank.  All ranks call this."""
    masters = optimizer_state.has_masters(iter(e.tensor for e in optimizer.entries))
    model: dict[str, ShardedTensor] = {}
    state: dict[str, ShardedTensor] = {}
    loads = [0] * optimizer.groups.dp_size
    for e in optimizer.entries:
        rank = loads.index(min(loads))
        loads[rank] += math.prod(e.shape)
        mine = rank == optimizer.groups.dp_rank
        for name, tensor in _parts(optimizer, e, masters):
            if mine:
                key = f"{optimizer_state.PREFIX}{name}.{e.key}" if name else e.key
                whole = tensor.detach().reshape(e.shape).to("cpu", copy=True)
                place = state if name else model
                place[key] = ShardedTensor.from_rank_offsets(key, whole, allow_shape_mismatch=e.padded)
    return {"model": model, "optimizer": state, "random": rng.sharded_state()}


def _parts(optimizer: ZeroOptimizer, e: Entry, masters: bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an entry: the parameter (without a name), its FP32 master and its moments."""
    if not e.trained:
        with optimizer.gathered([e.tensor] if isinstance(e.tensor, nn.Parameter) else []):
            yield "", e.tensor
        return
    assert isinstance(e.tensor, nn.Parameter)
    weight = optimizer.read(e.tensor)
    yield "", weight.to(e.tensor.dtype)
    if masters:
        yield "param", weight
    for name in MOMENTS:
        yield name, optimizer.read(e.tensor, name)


def load(path: Path, optimizer: ZeroOptimizer, names: Any, updates: int | None, lacking: Sequence[str] = ()) -> None:
    """Weights, from FP32 masters where there are some, and unless `updates` is None moments and Adam's count.

    `names`: of everything in the checkpoint; `lacking`: parameters that keep their values.  All ranks call this.
    """
    wanted: list[tuple[str, Entry, str]] = []
    for e in (e for e in optimizer.entries if e.key not in lacking):
        master = reader.MASTER + e.key
        wanted.append((master if master in names else e.key, e, ""))
        if updates is not None and e.trained:
            wanted += [(f"{optimizer_state.PREFIX}{name}.{e.key}", e, name) for name in MOMENTS]
    for some in _batches(wanted):
        found = reader.read(path, {key: m for key, m in reader.tensors(path).items() if key in {k for k, _, _ in some}})
        for key, e, name in some:
            value = _fitted(found[key], e)
            if isinstance(e.tensor, nn.Parameter):
                optimizer.write(e.tensor, value, name)
            else:
                e.tensor.copy_(value)
    if updates is not None:
        optimizer.set_count(updates)


def _batches(wanted: list[tuple[str, Entry, str]]) -> Iterator[list[tuple[str, Entry, str]]]:
    some: list[tuple[str, Entry, str]] = []
    size = 0
    for one in wanted:
        bytes_ = 4 * math.prod(one[1].shape)
        if some and size + bytes_ > AT_ONCE:
            yield some
            some, size = [], 0
        some.append(one)
        size += bytes_
    if some:
        yield some


def _fitted(value: Tensor, e: Entry) -> Tensor:
    """With the rows of this run's table; those beyond the vocabulary are never read."""
    if not e.padded or tuple(value.shape) == e.shape:
        return value
    fitted = value.new_zeros(e.shape)
    rows = min(len(fitted), len(value))
    fitted[:rows] = value[:rows]
    return fitted
