"""The scales of FP8's delayed scaling in a checkpoint.

Plain tensors by layer: they move with the layers to another layout, other precisions ignore them, and checkpoints
contain nothing pickled by Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

PREFIX = "fp8."


class Scales(Protocol):
    """Their owner in a running model: `engine.fp8.Fp8`."""

    def allocate(self) -> None: ...
    def scales(self) -> dict[str, Tensor]: ...
    def load_scales(self, values: Mapping[str, Tensor]) -> None: ...


def sharded_state(fp8: Scales | None) -> dict[str, ShardedTensor]:
    """The existing ones: all ranks of a stage have the same."""
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    dp_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return {
        name: ShardedTensor.from_rank_offsets(PREFIX + name, value, replica_id=(0, tp_rank, dp_rank))
        for name, value in (fp8.scales() if fp8 else {}).items()
    }
