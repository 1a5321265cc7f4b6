"""Stopping on request: signals and files request it, and all ranks act on the request at the same point.

SIGUSR1, SIGUSR2       save, end with 75: restart me (the batch system announces the end of the time limit)
SIGTERM                save, end with 143: the sender decides what comes next
SIGINT                 save, end with 130; a second one ends at once
file <run>/STOP        save, end with 0, and remove the file
file $MEGAPONDER_REQUEUE_FILE   as SIGUSR1: for launchers that do not forward it, such as torchrun
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, wait
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from megaponder.config import launcher
from megaponder.errors import REQUEUE, UserError
from megaponder.ranks import gather, largest
from megaponder.training import early_signals

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
STOP_FILE, REQUEUE_FILE, UNREADABLE = 101, 102, 103
"""Larger than all signal numbers.  Data that cannot be read also stop a run, and take precedence."""
EXIT_CODES = {
    signal.SIGUSR1: REQUEUE, signal.SIGUSR2: REQUEUE, REQUEUE_FILE: REQUEUE,
    signal.SIGTERM: 143, signal.SIGINT: 130, STOP_FILE: 0,
}  # fmt: skip
POLL = 0.5
"""Seconds between checks of the files while waiting for data."""


class StopFlag:
    """Catches the signals while in use (a context manager); a second SIGINT ends the process as usual."""

    def __init__(self, device: torch.device, run: Path):
        self.device, self.caught = device, 0
        self._unreadable: str | None = None
        self.files = {STOP_FILE: run / "STOP"}
        if path := os.environ.get("MEGAPONDER_REQUEUE_FILE"):
            self.files[REQUEUE_FILE] = Path(path)
        self._looks = launcher.place().local_rank == 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        self._before = {number: signal.signal(number, self._catch) for number in SIGNALS}
        self.caught = self.caught or early_signals.caught()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.caught = number

    def asked(self) -> int:
        """This rank's request: the signal it has caught or the number of a file, 0 if none."""
        return self.caught or next((number for number, path in self.files.items() if path.exists()), 0)

    def agreed(self) -> int:
        """Any rank's request: a collective, the same answer on every rank.  One rank per node checks the files."""
        mine = self.asked() if self._looks else self.caught
        return largest(mine, self.device)

    def wait(self, future: Future[T]) -> T | None:
        """The future's result, or None if a request to stop or a UserError comes first.

        `agreed` will then be true on all ranks.  Storage can stall for longer than a preempted job has left.
        """
        while not wait([future], timeout=POLL).done:
            if number := self.asked():
                self.caught = number
                return None
        try:
            return future.result()
        except UserError as error:  # the others must be told, and the progress must be saved
            self.caught, self._unreadable = UNREADABLE, str(error)
            return None

    def unreadable(self, step: int) -> UserError:
        """The error that ended a run after `step`, the same on all ranks.  A collective."""
        said = next(one for one in gather(self._unreadable) if one.value is not None)
        saved = f"The run ends after step {step}, which is saved" if step else "The run ends before its first step"
        return UserError(f"{saved}; {said.who} says: {said.value}")

    def clear(self) -> None:
        """Remove the stop file that was obeyed, so that the next start continues.  One rank calls this."""
        self.files[STOP_FILE].unlink(missing_ok=True)


def words(number: int) -> str:
    """What asked for the stop."""
    files = {STOP_FILE: "the file STOP", REQUEUE_FILE: "the launcher's requeue file"}
    return files.get(number) or signal.Signals(number).name
