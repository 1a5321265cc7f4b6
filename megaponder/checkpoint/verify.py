"""Reading back what the writers of a checkpoint have written, before it is published and an older one deleted.

Every rank reads what another rank wrote, on another node if there are several, from the disk and not from the system's
cache; the first rank also checks that all files in the index of tensors exist.  It runs in a thread beside the training
loop: reading and checksums release the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from megaponder import ranks
from megaponder.checkpoint import manifest, reader
from megaponder.ranks import Said


class Verification:
    """This rank's share of the reading, started at once.  `written`: what each rank knows of its own files."""

    def __init__(self, path: Path, written: list[Said], rank: int):
        self.path, self.known = path, {name: want for s in written for name, want in s.value.items()}
        self.complaint: str | None = None
        """What is wrong, once done; None if nothing is."""
        own = written[(rank - _distance(written)) % len(written)].value
        self._thread = threading.Thread(target=self._run, args=(own, rank == 0), name="verify-checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether everything has been read."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until everything has been read."""
        self._thread.join()

    def _run(self, own: manifest.Files, first: bool) -> None:
        end, pause = time.monotonic() + ranks.PATIENCE, 0.1
        while True:  # a network file system may show files late
            self.complaint = self._look(own, first)
            if self.complaint is None or time.monotonic() > end:
                return
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _look(self, own: manifest.Files, first: bool) -> str | None:
        try:
            if first:
                if (reason := manifest.missing(self.path, self.known)) is not None:
                    return reason
                if (lacks := reader.unlisted(self.path, self.known)) is not None:
                    return f"what the writers say {lacks}"
            return next((r for name in own if (r := manifest.changed(self.path, name, own[name], fresh=True))), None)
        except (OSError, ValueError) as error:
            return str(error)


def _distance(written: list[Said]) -> int:
    """Distance in ranks between a writer and the reader of its files: a node's ranks, if there are several nodes."""
    hosts = [s.host for s in written]
    return hosts.count(hosts[0]) if len(set(hosts)) > 1 else 1
