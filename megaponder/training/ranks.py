"""Acting on one rank in the name of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megaponder.errors import UserError, of_file

T = TypeVar("T")


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
