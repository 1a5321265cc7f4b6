"""Stopping on request: SIGTERM (preemption) and SIGINT set a flag, and all ranks act on it at the same step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopFlag:
    """Catches the signals while in use (a context manager); a second SIGINT ends the process as usual."""

    def __init__(self, device: torch.device):
        self.device, self.caught = device, 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        self._before = {number: signal.signal(number, self._catch) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.caught = number

    def agreed(self) -> int:
        """The signal that any rank has caught, 0 if none: a collective, the same answer on every rank."""
        flag = torch.tensor([self.caught], dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return int(flag.item())
