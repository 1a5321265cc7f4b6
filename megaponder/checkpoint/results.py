"""Where a checkpoint's writer process leaves its results for the training process.

megatron-core uses a queue of a multiprocessing manager, a further process per rank.  That process dies of the very
SIGTERM that announces a preemption, so that the last save would fail, and it outlives a killed trainer.  A file does
neither.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
from pathlib import Path
from typing import Any


class ResultFile:
    """A queue for one item, from a forked child to its parent.  The file holds megatron-core's own result objects."""

    def __init__(self, path: Path):
        self.path = path

    def put(self, item: Any) -> None:
        """Store the item; called in the writer process.  On a full disk it stays away, which the parent will report."""
        temporary = self.path.with_name(self.path.name + ".tmp")
        with contextlib.suppress(OSError):
            temporary.write_bytes(pickle.dumps(item))
            temporary.replace(self.path)

    def get_nowait(self) -> Any:
        """Take the item; queue.Empty if the writer ended without leaving one."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            raise queue.Empty from None
        self.path.unlink()
        return pickle.loads(data)


def use(path: Path) -> None:
    """Let the next save of this process report through `path`."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = ResultFile(path)
