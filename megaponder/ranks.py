"""Agreement among ranks: one acts for all, all take the maximum, or all confirm what they see."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megaponder.errors import UserError, of_file

T = TypeVar("T")
PATIENCE = 15.0
"""Seconds for which ranks retry when they see different things: a network file system can lag."""


def largest(value: int, device: torch.device) -> int:
    """The maximum over all ranks, on each of them."""
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


@dataclass(frozen=True)
class Said:
    """What one rank reports."""

    rank: int
    host: str
    value: Any

    @property
    def who(self) -> str:
        """The rank and its machine."""
        return f"rank {self.rank} on {self.host}"


def gather(value: Any) -> list[Said]:
    """Every rank's value (small, picklable), in the order of ranks, on each of them.  A collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (socket.gethostname(), value))
    return [Said(rank, host, value) for rank, (host, value) in enumerate(every)]


def confirm_same(what: str, value: str, hint: str) -> None:
    """UserError on all ranks, naming rank and host, if one of them has a different value from rank 0.  A collective.

    `what` starts the sentence and names the field or file, `hint` ends it with what to do.
    """
    first, *others = gather(value)
    for other in others:
        if other.value != first.value:
            raise UserError(f"{what} is {other.value} on {other.who}, and {first.value} on {first.who}; {hint}.")


def settle(look: Callable[[], Any], patience: float | None = None) -> list[Said]:
    """What every rank sees, once they all see the same; or what they saw last, after retrying for `patience` seconds.

    One collective if all agree; otherwise retries with growing pauses, timed by rank 0's clock.
    """
    end, pause = time.monotonic() + (PATIENCE if patience is None else patience), 0.1
    while True:
        said = gather((look(), time.monotonic() < end))
        values = [Said(s.rank, s.host, s.value[0]) for s in said]
        if all(v.value == values[0].value for v in values) or not said[0].value[1]:
            return values
        time.sleep(pause)
        pause = min(2 * pause, 2.0)


def confirm(look: Callable[[], str | None], patience: float | None = None) -> Said | None:
    """Let every rank look until none has a complaint (`look` returns None); returns the first lasting complaint, or
    None."""
    return next((s for s in settle(look, patience) if s.value is not None), None)
