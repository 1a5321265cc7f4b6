"""What the engine offers a method on the first and last stage (the protocols of ponder.base)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from megaponder.backbone.row_kernels import only
from megaponder.decoding.noise import document_sums, sequence_uniform, token_noise
from megaponder.engine.mixture import vocabulary_mixture

if TYPE_CHECKING:
    from megaponder.backbone.context import Context
    from megaponder.data.batch import MicroBatch
    from megaponder.engine.active_rows import Rows
    from megaponder.engine.groups import Groups
    from megaponder.ponder.base import Method


class _Broadcast(torch.autograd.Function):
    """Broadcast from the group's first rank; the gradient stays where it is, since all ranks compute the same one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.detach().clone().contiguous()
        dist.broadcast(out, src=dist.get_global_rank(group, 0), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class StageParts(Protocol):
    """What the tools use of a stage (`engine.model.PonderStage`)."""

    config: Any
    groups: Groups
    context: Context | None
    method: Method
    vocab_size: int
    embedding_scale: float
    method_entry: nn.ModuleDict
    method_modules: nn.ModuleDict

    @property
    def embedding(self) -> Any: ...
    @property
    def final_norm(self) -> Any: ...
    def head_weight(self) -> Tensor: ...
    def table_weight(self) -> Tensor: ...
    def gathered(self, active: Tensor | None) -> Rows | None: ...
    def local_logits(self, hidden_sbh: Tensor) -> Tensor: ...
    def cross_entropy(self, hidden_sbh: Tensor, labels_nb: Tensor) -> Tensor: ...


def positions(batch: MicroBatch) -> Tensor:
    """Position of each token in its sequence, or in its document where those are apart: int64 [b, n]."""
    b, n = batch.ids_bn.shape
    places = torch.arange(n, device=batch.ids_bn.device) if batch.places_n is None else batch.places_n
    return places.expand(b, n) if batch.starts_bn is None else places - batch.starts_bn


class StageEntryTools:
    """First stage: token embeddings."""

    def __init__(self, stage: StageParts, batch: MicroBatch, step: Tensor | None):
        self._stage, self._tokens = stage, batch.ids_bn.shape[1]
        self._batch, self._step = batch, step

    @property
    def modules(self) -> nn.ModuleDict:
        return self._stage.method_entry

    def embed(self, ids_bn: Tensor, factor: float = 1.0) -> Tensor:
        counted = self._batch.starts_bn is None and self._batch.places_n is None
        at_bn = None if counted else positions(self._batch)
        slots = ids_bn.shape[1] // self._tokens
        return self._stage.embedding(ids_bn, slots=slots, factor=factor, positions_bn=at_bn)

    def uniform(self, seed: int) -> Tensor | None:
        if self._step is None:
            return None
        ids, starts, context = self._batch.ids_bn, self._batch.starts_bn, self._stage.context
        if context is not None:  # whole sequences draw
            ids = context.gather(ids.t()).t()
            starts = None if starts is None else context.gather(starts.t()).t()
        found = sequence_uniform(ids, seed, self._step.long(), starts)
        if starts is None:
            return found
        return self._own(found.t() if context is None else context.own(found.t()))

    def noise(self, seed: int) -> Tensor:
        step = -1 if self._step is None else self._step.long()
        ids_sb, at_sb = self._own(self._batch.ids_bn.t()), self._own(positions(self._batch).t())
        return token_noise(ids_sb, at_sb, seed, step, self._stage.config.hidden_size)

    def _own(self, x_nb: Tensor) -> Tensor:
        """This rank's tokens."""
        stage = self._stage
        if stage.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(x_nb.contiguous(), group=stage.groups.tp)
        return x_nb


class StageExitTools:
    """Last stage: final norm, vocabulary mixture, the method's modules, and the targets of this rank's tokens."""

    def __init__(self, stage: StageParts, batch: MicroBatch, step: Tensor | None):
        self._stage, self._batch, self.step = stage, batch, step
        self.max_depth, self.vocab_size = stage.method.max_depth(), stage.vocab_size

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

    def broadcast(self, x: Tensor) -> Tensor:
        """The first tensor rank's values, on all of them: inputs to a decision must be bit-equal."""
        groups = self._stage.groups
        if groups.tp_size == 1 or self._stage.config.sequence_parallel:
            return x  # under sequence parallelism each token is on one rank only
        return _Broadcast.apply(x, groups.tp)

    def on(self, active: Tensor, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """compute(x) at active tokens, 0 at the others; with skip_halted the others are not computed."""
        rows = self._stage.gathered(active)
        if rows is not None:
            return rows.scatter(compute(rows.gather(x)))
        out = compute(x)
        return only(active, out, torch.zeros_like(out))

    def target_probability(self, h_sbh: Tensor, active: Tensor) -> Tensor:
        """exp(-cross entropy) of each active token's target, undefined elsewhere: [tokens of this rank, b]."""
        return torch.exp(-self.target_loss(h_sbh, active))

    @torch.no_grad()
    def target_loss(self, h_sbh: Tensor, active: Tensor) -> Tensor:
        """Cross entropy of each active token's target, anything finite elsewhere: [tokens of this rank, b]."""
        stage, labels = self._stage, self._batch.labels_bn.t().contiguous()
        rows = stage.gathered(active)
        if rows is None:
            return self.sharded(stage.cross_entropy(h_sbh.detach(), labels))
        found = stage.cross_entropy(rows.gather(h_sbh.detach()), rows.all_gather().gather(labels))
        return rows.scatter(self.sharded(found))

    def losses(self, h_sbh: Tensor) -> Tensor:
        """Cross entropy of each token's target, with gradient: [tokens of this rank, b]."""
        return self.sharded(self._stage.cross_entropy(h_sbh, self._batch.labels_bn.t().contiguous()))

    @torch.no_grad()
    def confidence(self, h_sbh: Tensor, active: Tensor) -> Tensor:
        """Largest next-token probability of each active token, anything finite elsewhere: [tokens of this rank, b]."""
        rows, tp = self._stage.gathered(active), self._stage.groups.tp
        logits = self._stage.local_logits((h_sbh if rows is None else rows.gather(h_sbh)).detach())
        top = logits.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp)
        total = (logits - top[..., None]).exp().sum(-1)
        dist.all_reduce(total, group=tp)
        found = self.sharded(1.0 / total)
        return found if rows is None else rows.scatter(found)

    def gather(self, x_sb: Tensor) -> Tensor:
        """Values of all tokens of each sequence, without gradient."""
        found, context = self.unsharded(x_sb), self._stage.context
        return found if context is None else context.gather(found)

    def scatter(self, x_nb: Tensor) -> Tensor:
        """This rank's tokens."""
        context = self._stage.context
        return self.sharded(x_nb if context is None else context.own(x_nb))

    def unsharded(self, x_sb: Tensor) -> Tensor:
        """Values of the micro-batch's tokens, on every tensor rank, without gradient."""
        if self._stage.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x_sb.detach(), group=self._stage.groups.tp)
        return x_sb.detach()

    def sharded(self, x_nb: Tensor) -> Tensor:
        """This rank's of the micro-batch's tokens."""
        if self._stage.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(x_nb.contiguous(), group=self._stage.groups.tp)
        return x_nb

    def _local(self, x_bn: Tensor) -> Tensor:
        return self.sharded(x_bn.t().contiguous())

    @property
    def full_mask_nb(self) -> Tensor:
        """`valid_sb` of the micro-batch's tokens, on every tensor rank."""
        return self._batch.loss_mask_bn.t()

    @property
    def valid_sb(self) -> Tensor:
        """1.0 where the token's target counts in the loss, else 0.0: [tokens of this rank, b]."""
        return self._local(self._batch.loss_mask_bn)

    @property
    def positions_sb(self) -> Tensor:
        """Position of each of this rank's tokens in its sequence, or in its document where those are apart."""
        return self._local(positions(self._batch))

    @property
    def starts_nb(self) -> Tensor | None:
        """The first token of each token's document, of all tokens; None: documents are not apart."""
        starts, context = self._batch.starts_bn, self._stage.context
        if starts is None:
            return None
        return starts.t() if context is None else context.gather(starts.t().contiguous())

    def total(self, x_sb: Tensor) -> Tensor:
        """Sums over each sequence, without gradient, or over the document of each of this rank's tokens."""
        everyone, starts = self.gather(x_sb), self.starts_nb
        if starts is None:
            return everyone.sum(0)[None]
        return self.scatter(document_sums(everyone.t(), starts.t()).t())

    @property
    def ids_sb(self) -> Tensor:
        """Ids of this rank's tokens."""
        return self._local(self._batch.ids_bn)


def run_pre_hooks(module: nn.Module) -> None:
    """Run a module's forward pre-hooks before its weight is used without calling it.

    megatron-core's overlapped parameter gather waits for the fresh weights in these hooks.
    """
    for hook in list(module._forward_pre_hooks.values()):
        hook(module, ())
