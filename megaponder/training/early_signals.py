"""Requests to stop that arrive before the training loop can catch them: during imports and the creation of groups.

SIGUSR1 and SIGUSR2 would kill the process; they are remembered, and the loop obeys them before its first step.  SIGTERM
and Ctrl-C end a process that has nothing to save, as they always do.  No torch here: importing it takes longest.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

_caught: list[int] = []


def listen() -> None:
    """Remember the signals from now on."""
    if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, _remember)


def _remember(number: int, frame: FrameType | None) -> None:
    _caught.append(number)


def caught() -> int:
    """The last signal, once; 0 if there was none."""
    number = _caught[-1] if _caught else 0
    _caught.clear()
    return number
