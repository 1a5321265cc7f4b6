"""Restarts within the processes: after an error on a rank, all of them leave their groups and train on from the newest
checkpoint, without being started again.

NVIDIA's resiliency extension (the extra `resilience`) tells every rank of the error, aborts what it waits for, and
meets with the others before the next attempt.  A mistake of the user ends the run at once, and so does a process that
is gone: only a launcher can replace it.
"""

from __future__ import annotations

import copy
import os
import socket
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megaponder.config import launcher
from megaponder.config.schema import RunConfig
from megaponder.engine import groups
from megaponder.errors import LostRank, UserError
from megaponder.training import fault_record
from megaponder.training.heartbeat import end_left_behind
from megaponder.training.lock import RunLock

PORT = "megaponder/in_process"
"""Key of the port at which the extension meets, in the store of the launcher."""
GRACE = 60.0
"""Seconds from a hang to the end of its process, and from there to the end of the wait for it."""


def library() -> Any:
    """The extension's module; UserError where it is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from nvidia_resiliency_ext import inprocess
    except ImportError:
        raise UserError(
            "faults.in_process_restarts: nvidia-resiliency-ext cannot be imported; pip install "
            "'megaponder[resilience]', or use 0."
        ) from None
    return inprocess


def run(cfg: RunConfig, once: Callable[[RunConfig], int]) -> int:
    """`once(cfg)`, again after errors, at most `faults.in_process_restarts` times.  All ranks call this.

    Raises UserError as `once` does, and the last error, or LostRank, when no attempt is left.
    """
    inprocess, here = library(), launcher.adopt()
    for name in ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "NCCL_NVLS_ENABLE"):
        os.environ.setdefault(name, "0")  # as the extension asks: groups that are aborted must not end the process
    last: list[Exception] = []

    class Begin(inprocess.initialize.RetryController):  # type: ignore[name-defined]
        """Counts attempts alike on all ranks."""

        def __call__(self, state: Any) -> Any:
            state = super().__call__(state)
            groups.attempt(state.iteration + 1)
            end_left_behind()
            RunLock(Path(cfg.run)).forget()
            if state.iteration and here.rank == 0:
                of = f"{state.iteration} of {cfg.faults.in_process_restarts}"
                print(f"Restart {of} within the processes.", file=sys.stderr, flush=True)
                fault_record.write(Path(cfg.run) / "faults.jsonl", "restart", number=state.iteration)
            return state

    def attempt() -> int | None:
        last.clear()
        try:
            return once(copy.deepcopy(cfg))
        except LostRank as error:
            last.append(error)
            raise
        except UserError as error:  # another attempt would end in the same way
            last.append(error)
            return None
        except Exception as error:
            last.append(error)
            raise

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "logging not initialized")
        wrapper = inprocess.Wrapper(
            initialize=Begin(cfg.faults.in_process_restarts + 1, min_world_size=here.world_size), **_times(cfg),
            store_kwargs={"port": _port(here.rank)},
        )  # fmt: skip
        try:
            code: int | None = wrapper(attempt)()
        except (inprocess.exception.RestartAbort, inprocess.exception.RestartError) as error:
            if last:
                raise last[-1] from error
            raise LostRank("Another rank was lost, and the processes cannot go on without it.") from error
    if code is None:
        raise last[-1]
    return code


def _times(cfg: RunConfig) -> dict[str, timedelta]:
    """The extension's limits: a rank that hangs is interrupted when it would be named, and killed a little later; over
    gloo, which cannot be interrupted, not before the collective that it waits in gives up."""
    hang, limit = 60 * (cfg.faults.hang_minutes or cfg.parallel.timeout_minutes / 2), 60 * cfg.parallel.timeout_minutes
    hard = (hang if torch.cuda.is_available() else max(hang, limit)) + GRACE
    seconds = {
        "soft_timeout": hang,
        "hard_timeout": hard,
        "barrier_timeout": hard + GRACE,
        "completion_timeout": limit,
        "monitor_thread_interval": min(30.0, hang / 4),
    }
    return {name: timedelta(seconds=value) for name, value in seconds.items()}


def _port(rank: int) -> int:
    """A free port of rank 0's host, which all ranks learn from the launcher's store."""
    store = groups.shared_store()
    if rank == 0:
        with socket.socket() as found:
            found.bind(("", 0))
            store.set(PORT, str(found.getsockname()[1]))
    return int(store.get(PORT))
