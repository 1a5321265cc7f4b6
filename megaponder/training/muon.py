"""Muon: the momentum of a matrix, orthogonalised, is its update.

    m <- beta m + (1 - beta) g          u = beta m + (1 - beta) g
    w <- (1 - lr wd) w - lr 0.2 sqrt(max(rows, columns)) O(u)

O(u) has the singular vectors of u and singular values near 1: a Newton-Schulz iteration (Jordan et al.,
https://kellerjordan.github.io/posts/muon/).  The factor gives the update the size of AdamW's, so that one learning rate
and one decay serve both (Moonlight, arXiv 2502.16982).  Queries, keys, values, gate and up are matrices of their own,
although they are stored together.

torch.optim.Muon knows no shards and computes in BF16 whatever the run does; megatron-core's needs a package that is not
on PyPI.  Here the tensor ranks gather u, and each computes the whole O(u) and takes its part of it.  Ranks with the
same weights may share the matrices out: each has the state of its own alone, updates them, and sends them on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5


@dataclass(frozen=True)
class Pieces:
    """The matrices in one parameter: its rows are `blocks` times a block, and a block has rows of each in turn."""

    blocks: int = 1
    rows: tuple[int, ...] = ()
    """Rows of each matrix in a block; empty: the parameter is one matrix."""


def orthogonal(u: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """O(u) of a matrix, computed in `dtype`."""
    x = u.to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x


def update_of(u: Tensor, pieces: Pieces, dtype: torch.dtype) -> Tensor:
    """0.2 sqrt(max(rows, columns)) O(u) of each matrix in a whole parameter."""
    if not pieces.rows:
        return orthogonal(u, dtype).float() * (0.2 * math.sqrt(max(u.shape)))
    parts = u.view(pieces.blocks, -1, u.shape[1]).split(pieces.rows, dim=1)
    done = [update_of(part.reshape(-1, u.shape[1]), Pieces(), dtype).view(part.shape) for part in parts]
    return torch.cat(done, dim=1).view(u.shape)


def owners(matrices: Iterable[Tensor], ranks: int) -> dict[Tensor, int]:
    """Which of `ranks` has which matrix: the largest first, each to the rank that has least; alike on all of them."""
    held = [0] * ranks
    found: dict[Tensor, int] = {}
    for p in sorted(matrices, key=lambda p: -p.numel()):  # stable: in the order of the layers
        rank = held.index(min(held))
        found[p], held[rank] = rank, held[rank] + p.numel()
    return found


@torch.no_grad()
def send(matrices: dict[Tensor, int], group: dist.ProcessGroup) -> None:
    """Every rank of the group gets each matrix from its owner."""
    sent = [
        dist.broadcast(p.data, dist.get_global_rank(group, owner), group=group, async_op=True)
        for p, owner in matrices.items()
    ]
    for work in sent:
        work.wait()


class Muon(torch.optim.Optimizer):
    """For matrices; parameters that megatron-core has split over the tensor group say so by `partition_dim`.

    Groups have `pieces`.  All ranks of `group` call `step` with the same parameters in the same order.
    """

    moments = ("exp_avg",)
    """Names of its states, by Adam's names."""
    shared_out = False
    """Whether no other rank with the same weights has the state of this one's matrices."""

    def __init__(
        self, params: Iterable[dict[str, Any]], lr: float, momentum: float, dtype: torch.dtype, group: dist.ProcessGroup
    ):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "pieces": Pieces()})
        self.momentum, self.dtype, self.group = momentum, dtype, group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - self.momentum)
                change = self._update(p, p.grad.lerp(m, self.momentum), group["pieces"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-group["lr"])

    def _update(self, p: Tensor, u: Tensor, pieces: Pieces) -> Tensor:
        """The update of this rank's part."""
        ranks, dim = self.group.size(), getattr(p, "partition_dim", -1)
        if ranks == 1 or dim < 0 or not getattr(p, "tensor_model_parallel", False):
            return update_of(u, pieces, self.dtype)
        u = u.contiguous()
        parts = [torch.empty_like(u) for _ in range(ranks)]
        dist.all_gather(parts, u, group=self.group)
        return update_of(torch.cat(parts, dim=dim), pieces, self.dtype).chunk(ranks, dim=dim)[self.group.rank()]
