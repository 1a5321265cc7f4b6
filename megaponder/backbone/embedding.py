"""Token embeddings (vocabulary-parallel), and positions: a learned table or rotary angles."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megaponder.backbone.fused import turns
from megaponder.config.model import ModelConfig
from megaponder.decoding.rotary import frequencies


class Embedding(MegatronModule):
    """scale * table[ids] (+ position row): [b, s] -> [s, b, H], or this rank's rows under sequence parallelism."""

    def __init__(
        self,
        config: TransformerConfig,
        rows: int,
        scale: float,
        positions: int,
        tp_group: torch.distributed.ProcessGroup,
    ):
        super().__init__(config=config)
        self.scale, self.tp_group = scale, tp_group
        self.word_embeddings = VocabParallelEmbedding(
            rows,
            config.hidden_size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=tp_group,
        )
        self.position_embeddings = None
        if positions:
            self.position_embeddings = nn.Embedding(positions, config.hidden_size, dtype=config.params_dtype)
            self.position_embeddings.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, ids_bs: Tensor, slots: int = 1, factor: float = 1.0, positions_bn: Tensor | None = None
    ) -> Tensor:
        """Embeddings of ids [b, n*slots]; all slots of a token share its position; `factor` does not apply to
        positions.  `positions_bn`: those of each sequence's tokens; None: 0 .. n-1."""
        words = self.word_embeddings(ids_bs)
        if not self.config.sequence_parallel:
            # contiguous rows: additions keep a transposed layout, and every norm and GEMM would copy its input
            words = words.transpose(0, 1).contiguous()
        if self.scale * factor != 1.0:
            words = words * (self.scale * factor)
        if self.position_embeddings is None:
            return words
        rows = words.shape[0]
        first = self.tp_group.rank() * rows if self.config.sequence_parallel else 0
        positions = torch.arange(first, first + rows, device=ids_bs.device) // slots
        if positions_bn is not None:
            return words + self.position_embeddings(positions_bn.t()[positions])
        return words + self.position_embeddings(positions)[:, None]


class Rotary:
    """Cosines and sines of positions 0 .. n-1 for the rotated channels of a head."""

    def __init__(self, model: ModelConfig, device: Any):
        assert model.head_size and model.rotary_fraction and model.rotary_base and model.max_positions
        size = int(model.head_size * model.rotary_fraction)
        # no text is longer than max_positions, up to which dynamic scaling changes nothing
        self._frequencies, self._factor = frequencies(
            size, model.rotary_base, model.rotary_scaling or {}, model.max_positions, device=device
        )
        self._adjacent = model.rotary_pairs == "adjacent"
        self._angles: dict[int, Tensor] = {}

    def __call__(self, n: int) -> Tensor:
        """See `fused.turns`: [2, n, 1, 1, r]."""
        if n not in self._angles:
            self._frequencies = self._frequencies.to(torch.cuda.current_device())
            rows = torch.arange(n, dtype=torch.float32, device=self._frequencies.device)
            angles = torch.outer(rows, self._frequencies)[:, None, None]
            pairs = angles.repeat_interleave(2, dim=-1) if self._adjacent else torch.cat([angles, angles], dim=-1)
            self._angles[n] = pairs
        return turns(self._angles[n], self._factor)


def rotary_embedding(config: TransformerConfig, model: ModelConfig) -> Rotary | None:
    """None without rotary positions."""
    if model.positions != "rotary":
        return None
    return Rotary(model, "cpu" if config.use_cpu_initialization else torch.cuda.current_device())
