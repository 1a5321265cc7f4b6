"""Random states of every rank as byte tensors.  They belong to a layout: a different one starts from the seed
instead."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

PREFIX = "random."


def states() -> dict[str, Tensor]:
    """Of every generator of this rank, on the CPU."""
    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    tracked = {f"tracker.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    return {name: state.cpu().clone() for name, state in (found | tracked).items() if isinstance(state, Tensor)}


def sharded_state() -> dict[str, Any]:
    """One row per rank of every generator: [world, bytes]."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        name: ShardedTensor.from_rank_offsets(PREFIX + name, state[None], (0, rank, world))
        for name, state in states().items()
    }


def load(state: dict[str, Tensor]) -> None:
    """Set every generator of this rank."""
    state = {name: row[0].cpu() for name, row in state.items()}
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    tracker = get_cuda_rng_tracker()
    tracked = dict(tracker.get_states())
    tracked |= {n.removeprefix("tracker."): s for n, s in state.items() if n.startswith("tracker.")}
    tracker.set_states(tracked)
