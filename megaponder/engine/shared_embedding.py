"""The last pipeline stage's copy of the input table, for tied heads and for mixtures over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import nn

KEY = "embedding.word_embeddings.weight"


class InputTable(MegatronModule):
    """Rows [V_padded/tp, H], always equal to the first stage's: same initialisation, gradients summed over both."""

    def __init__(self, config: TransformerConfig, rows: int, tp_group: torch.distributed.ProcessGroup):
        super().__init__(config=config)
        self.tp_group = tp_group
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        shape = (rows // tp_group.size(), config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.weight.partition_dim = 0  # type: ignore[attr-defined]
        self.weight.partition_stride = 1  # type: ignore[attr-defined]
        # counted once in the gradient norm, at the first stage
        self.weight.shared = True  # type: ignore[attr-defined]
        self.weight.shared_embedding = True  # type: ignore[attr-defined]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict:
        """The same checkpoint entry as the first stage's table, marked as a further replica of it."""
        group = (metadata or {}).get("dp_cp_group")
        dp_rank = group.rank() if group is not None else 0
        return {
            f"{prefix}weight": make_tp_sharded_tensor_for_checkpoint(
                tensor=self.weight,
                key=KEY,
                replica_id=(1, 0, dp_rank),
                allow_shape_mismatch=True,
                tp_group=self.tp_group,
                dp_cp_group=group,
            )
        }
