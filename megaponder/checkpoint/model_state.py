"""The model's part of a checkpoint: every parameter under its own name, unsharded and independent of the layout."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


def metadata() -> dict[str, Any]:
    """Metadata for megatron-core's sharded state dicts.

    fully_reshardable is the one optimizer format that survives a change of layout (the default is broken in 0.16.1);
    non_homogeneous_layers gives each layer its own entries instead of one stacked tensor.
    """
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def layout() -> dict[str, int]:
    """Sizes of the present layout."""
    context = parallel_state.get_context_parallel_world_size()
    sizes = {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
    }
    return sizes | ({"context": context} if context > 1 else {})  # states from before it existed have no such entry


def sharded_state(stage: MegatronModule) -> dict[str, Any]:
    """Sharded parameters by name, without what Transformer Engine would pickle beside them (`checkpoint.scales`)."""
    state = stage.sharded_state_dict(metadata=metadata())
    return {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}


def of_whole(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Whole tensors by their stored names, as this process alone would save them."""
    return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
