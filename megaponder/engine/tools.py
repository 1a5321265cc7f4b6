"""What the engine gives a method on the first and the last stage (the protocols of ponder.base)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from torch import Tensor, nn

from megaponder.engine.mixture import vocabulary_mixture

if TYPE_CHECKING:
    from megaponder.data.batch import MicroBatch
    from megaponder.engine.stage import PonderStage


class StageEntryTools:
    """First stage: token embeddings."""

    def __init__(self, stage: PonderStage, tokens: int):
        self._stage, self._tokens = stage, tokens

    def embed(self, ids_bn: Tensor, factor: float = 1.0) -> Tensor:
        return self._stage.embedding(ids_bn, slots=ids_bn.shape[1] // self._tokens, factor=factor)


class StageExitTools:
    """Last stage: final norm, vocabulary mixture, the method's modules, and the targets of this rank's tokens."""

    def __init__(self, stage: PonderStage, batch: MicroBatch):
        self._stage, self._batch = stage, batch

    @property
    def modules(self) -> nn.ModuleDict:
        return self._stage.method_modules

    def norm(self, h_sbh: Tensor) -> Tensor:
        return self._stage.final_norm(h_sbh)

    def mixture(self, h_sbh: Tensor, topk: int = 0) -> Tensor:
        stage = self._stage
        return vocabulary_mixture(
            h_sbh,
            stage.head_weight(),
            stage.table_weight(),
            scale=stage.embedding_scale,
            topk=topk,
            vocab_size=stage.vocab_size,
            group=stage.groups.tp,
            sequence_parallel=stage.config.sequence_parallel,
        )

    def _local(self, x_bn: Tensor) -> Tensor:
        x_nb = x_bn.t().contiguous()
        if self._stage.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(x_nb, group=self._stage.groups.tp)
        return x_nb

    @property
    def valid_sb(self) -> Tensor:
        """1.0 where the token's target counts in the loss, else 0.0: [tokens of this rank, b]."""
        return self._local(self._batch.loss_mask_bn)

    @property
    def labels_sb(self) -> Tensor:
        """Target ids of this rank's tokens."""
        return self._local(self._batch.labels_bn)


def run_pre_hooks(module: nn.Module) -> None:
    """Run a module's forward pre-hooks before its weight is used without calling it.

    megatron-core's overlapped parameter gather waits for the fresh weights in these hooks.
    """
    for hook in list(module._forward_pre_hooks.values()):
        hook(module, ())
