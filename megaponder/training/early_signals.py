"""Requests to stop that come before the training loop can catch them: while libraries are imported and groups are made.

SIGUSR1 and SIGUSR2 would kill the process; they are remembered, and the loop obeys them before its first step.  SIGTERM
and Ctrl-C end a process that has nothing to save, as they always do.  No torch here: its import is the long part.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

_caught: list[int] = []


def listen() -> None:
    """Remember the signals from now on."""
    if threading.current_thread() is threading.main_thread():  # elsewhere Python lets nobody set a handler
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, _remember)


def _remember(number: int, frame: FrameType | None) -> None:
    _caught.append(number)


def caught() -> int:
    """The last signal, once; 0 if there was none."""
    number = _caught[-1] if _caught else 0
    _caught.clear()
    return number
