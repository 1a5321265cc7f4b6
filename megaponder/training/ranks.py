"""Ranks that agree: one acts in the name of all, or all take the largest of their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megaponder.errors import UserError, of_file

T = TypeVar("T")


def largest(value: int, device: torch.device) -> int:
    """The largest of all ranks' numbers, on each of them."""
    box = torch.tensor([value], dtype=torch.int32, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box.item())


def on_first_rank(action: Callable[[], T]) -> T:
    """Result of `action` run on rank 0, on every rank; its UserError, or one for a file, is raised on all of them."""
    box: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = action()
        except UserError as error:
            box[1] = str(error)
        except OSError as error:
            if (problem := of_file(error)) is None:
                raise
            box[1] = str(problem)
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise UserError(str(box[1]))
    return box[0]  # type: ignore[return-value]
