"""State that stays on a pipeline stage between two passes of a micro-batch, including its gradient.

Pass k and pass k+1 of a stage run in separate forward and backward calls of the schedule, so autograd cannot connect
them.  What pass k leaves is detached into leaves for pass k+1; a no-op on pass k's output adds the leaves' gradients
when pass k runs backward, which is always after pass k+1 has (data dependency).  The no-op sits on the output, not on
the state itself, so that state which pass k does not use further still gets its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from megaponder.backbone.layer import Kept


@dataclass
class PassState:
    """What a stage carries between the passes of one micro-batch."""

    kept: list[Kept] = field(default_factory=list)
    """Per layer: what `attend` kept (empty lists and tuples in pass 0)."""
    entry: dict[str, Tensor] = field(default_factory=dict)
    """The method's `carry` of the first stage."""
    exit: dict[str, Tensor] = field(default_factory=dict)
    """The method's `carry` of the last stage."""


class _AddLeafGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, leaves: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.leaves = leaves
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [leaf.grad for leaf in ctx.leaves]
        ctx.leaves = None  # this pass is over
        return (grad, None, *grads)


class Stash:
    """Pass states by micro-batch."""

    def __init__(self) -> None:
        self._states: dict[int, PassState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def take(self, microbatch: int) -> PassState:
        """The state that the previous pass left; from now on the graph of the next pass holds it."""
        return self._states.pop(microbatch)

    def put(self, microbatch: int, state: PassState, output: Tensor) -> Tensor:
        """Keep `state` for the next pass; returns `output`, tied to the state's gradients."""
        tensors, shape = _pytree.tree_flatten((state.kept, state.entry, state.exit))
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self._states[microbatch] = PassState(*_pytree.tree_unflatten(leaves, shape))
        if not (torch.is_grad_enabled() and tensors):
            return output
        return _AddLeafGradients.apply(output, leaves, *tensors)
