"""Context parallelism: the ranks of a group share each sequence.

Of 2 CP equal pieces rank r holds piece r and piece 2 CP - 1 - r, so that under a causal mask all ranks have the same
work.  Only attention looks beyond: it gathers keys and values of the whole sequence, and its own queries see them by
their places.  In the backward every rank gets the sum of the gradients that all ranks have for its keys and values.

Everything else of a rank is its own tokens', whether a layer, a decision to halt, or a loss; sums over them are
added up with those of data-parallel ranks.

Shapes: n tokens of a sequence, s of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor


def part_of(x: Tensor, size: int, rank: int, dim: int = 0) -> Tensor:
    """What one of `size` ranks holds of a sequence that lies along `dim`: [.. n ..] -> [.. n / size ..]."""
    pieces = x.chunk(2 * size, dim=dim)
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim=dim)


def whole_of(parts: Tensor, size: int) -> Tensor:
    """The sequence, from the parts of all ranks in turn: [size * s, ...] -> [n, ...] with n = size * s."""
    early, late = parts.unflatten(0, (size, 2, -1)).unbind(1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def parts_of(whole: Tensor, size: int) -> Tensor:
    """The inverse of `whole_of`."""
    early, late = whole.unflatten(0, (2, size, -1)).unbind(0)
    return torch.stack([early, late.flip(0)], dim=1).flatten(0, 2)


class Context:
    """The group that shares a sequence, and this rank's place in it.

    Rows may be several a token, one token's after the other's.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size, self.rank = group, group.size(), group.rank()

    @property
    def pieces(self) -> tuple[int, int]:
        """The numbers of the pieces that this rank holds, of 2 * size."""
        return self.rank, 2 * self.size - 1 - self.rank

    def gather(self, x: Tensor) -> Tensor:
        """Rows of the whole sequence from this rank's, [s, ...] -> [n, ...]; gradients are summed over the ranks."""
        parts = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.group)
        return whole_of(parts, self.size)

    def add_up(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum over the ranks: [n, ...] -> [s, ...]."""
        out: Tensor = reduce_scatter_to_sequence_parallel_region(parts_of(x, self.size), group=self.group)
        return out

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of the whole sequence: the inverse of `gather`, without communication."""
        return part_of(x, self.size, self.rank)
