"""Writing a rank's shards, in forked processes where they are large, and what these report to the training process.

megatron-core waits for ever for a writer that the kernel has killed (out of memory), and its queue is another process,
which dies from the very SIGTERM that announces a preemption.  Here each process is joined and leaves its result in a
file.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megaponder.checkpoint import manifest
from megaponder.engine.megatron_versions import request_to_save, save_strategy
from megaponder.errors import of_file

WORTH_ANOTHER = 1 << 23
"""Bytes of a rank's weights from which on two processes write them; what is smaller is written where it is: to fork a
process costs this one 150 ms of CPU, page by page."""


class WriteError(Exception):
    """Why a writer has failed, in words without a full stop."""


class Results:
    """A queue for one item, from a forked child to its parent.  The file holds megatron-core's own result objects."""

    def __init__(self, path: Path):
        self.path = path
        self.process: BaseProcess | None = None
        """The child, where there is one."""
        self.part: manifest.Files = {}
        """Size and checksum of the files that were written."""
        self.parent = os.getpid()
        self._item: Any = None

    def put(self, item: Any) -> None:
        """Store the item; called in the child, which exits with the error number if the disk is full."""
        if os.getpid() == self.parent:
            self._item = item
            return
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            temporary.write_bytes(pickle.dumps((item, self.part)))
            temporary.replace(self.path)
        except OSError as error:
            os._exit(error.errno or 1)

    def get_nowait(self) -> Any:
        """Take the item once the child has ended; a WriteError if it left none."""
        if self._item is not None:
            return self._item
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return WriteError(_end(self.process, self.path))
        self.path.unlink()
        item, self.part = pickle.loads(data)
        return item


def strategy(stage: Any) -> Any:
    """megatron-core's way to save this rank's stage (an `nn.Module`) and what belongs to it."""
    weights = sum(p.numel() * p.element_size() for p in stage.parameters())
    return save_strategy(writers=2 if weights >= WORTH_ANOTHER else 1)


def request(tensors: dict[str, Any], path: Path, strategy: Any) -> tuple[Any, Results]:
    """megatron-core's request to save `tensors` into the folder `path`, with these writers; and what they will
    report."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results = filesystem_async._results_queue = Results(path / f".results-{dist.get_rank()}")
    found = request_to_save(tensors, path, strategy)
    assert found is not None
    if found.async_fn is not None:  # megatron-core's writer: only its transforms are used
        found = found._replace(async_fn=partial(write, found.async_fn.args[0]))
    return found, results


def write(transforms: list[Any], rank: int, buckets: list[Any], results: Results) -> None:
    """Write each bucket in a process of its own, a single one here; then take the checksums of what was written."""
    if os.getpid() != results.parent:
        gc.disable()  # it could free the trainer's CUDA tensors, which a forked child must not touch
    boxes = [Results(results.path.with_name(f"{results.path.name}-{i}")) for i in range(len(buckets))]
    if len(buckets) == 1:
        _write(transforms, 0, buckets[0], boxes[0])
    else:
        _fork(transforms, buckets, boxes)
    items = [box.get_nowait() for box in boxes]
    failed = next((item for item in items if isinstance(item, Exception)), None)
    if failed is None:
        try:
            results.part = manifest.describe(results.path.parent, (name for _, name, _ in buckets))
        except OSError as error:
            failed = WriteError(_words(error, str(results.path.parent)))
    results.put(failed or dict(enumerate(items)))


def _fork(transforms: list[Any], buckets: list[Any], boxes: list[Results]) -> None:
    context = get_context("fork")
    for i, (bucket, box) in enumerate(zip(buckets, boxes, strict=True)):
        box.process = context.Process(target=_write, args=(transforms, i, bucket, box))
        box.process.start()
    for box in boxes:
        assert box.process is not None
        box.process.join()


def _write(transforms: list[Any], index: int, bucket: Any, box: Results) -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    if os.getpid() != box.parent:
        gc.disable()

    class Told:
        put = staticmethod(lambda told: box.put(explained(told[1], bucket[0])))

    class Untold:
        get = task_done = staticmethod(lambda: None)

    FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, Told, Untold, True)


def explained(told: Any, path: str) -> Any:
    """The error of a writer, naming its file.  PyTorch drops the system's reason; one more write recovers it."""
    if not isinstance(told, Exception):
        return told
    if not isinstance(told, OSError):
        try:
            with open(path, "ab") as file:
                file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            told = error
    return WriteError(_words(told, path))


def _words(error: Exception, path: str) -> str:
    if isinstance(error, OSError):
        error.filename = error.filename or path
        return str(of_file(error)).rstrip(".")
    return f"{path}: {error}".rstrip(".")


def _end(process: BaseProcess | None, path: Path) -> str:
    """How a child that left no result has ended."""
    code = process.exitcode if process is not None else None
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        why = " (as the kernel does when memory runs out)" if -code == signal.SIGKILL else ""
        return f"a process that wrote it was killed by {name}{why}"
    return f"{path.parent}: {os.strerror(code)}" if code else "a process that wrote it ended without a result"


@contextmanager
def one_sentence(path: Path, said: Callable[[str], Exception]) -> Iterator[None]:
    """Turns a write into the folder `path` that failed (disk full, folder gone) into the error that `said` makes."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reasons = dict.fromkeys(str(e).removeprefix("Worker failure: ").rstrip(".") for e, _ in error.failures.values())
        raise said("; ".join(reasons) or "another rank gives the reason") from error
    except (OSError, RuntimeError) as error:  # the small files, which the first rank writes
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise said(str(explained(error, str(path / "common.pt")))) from error
