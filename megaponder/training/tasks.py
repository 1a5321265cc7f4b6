"""Tasks of lm-eval in the loop: the first rank runs them on the checkpoint that was just saved, the others wait."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import torch.distributed as dist

from megaponder.errors import UserError
from megaponder.inference import tasks
from megaponder.ranks import largest

if TYPE_CHECKING:
    from megaponder.training.build import Run

POLL = 0.2
"""Seconds between two looks at whether the tasks are done."""
RUNNING, DONE, FAILED = range(3)


def evaluate(run: Run) -> dict[str, float]:
    """Row values `task_...` of the newest checkpoint on the first rank, nothing on the others; nothing where a request
    to stop came first, and a warning where a task failed.  A collective."""
    run.saver.wait()
    future: Future[dict[str, float]] = Future()
    first = dist.get_rank() == 0
    if first:
        Thread(target=_work, args=(run, future), name="tasks", daemon=True).start()
    while True:
        run.clock.enter("evaluation")  # the heartbeat: no rank hangs
        mine = RUNNING if not first or not future.done() else FAILED if future.exception() else DONE
        state = largest(mine, run.engine.groups.device)
        if state != RUNNING or run.stop.agreed():
            break
        time.sleep(POLL)
    if not first or state == RUNNING:
        return {}
    problem = future.exception()
    run.monitor.warn("tasks", None if problem is None else f"The tasks failed: {problem}")
    return {} if problem is not None else future.result()


def _work(run: Run, future: Future[dict[str, float]]) -> None:
    train = run.cfg.train
    try:
        folder = Path(run.cfg.run)
        found = tasks.evaluate(folder, train.tasks, folder=train.tasks_folder, limit=train.tasks_limit or None)
        future.set_result(values(found))
    except UserError as error:
        future.set_exception(error)
    except Exception as error:  # whatever a task raises: training goes on
        future.set_exception(UserError(f"{type(error).__name__}: {error}"))


def values(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """lm-eval's numbers as values of a row: task_piqa_acc; without standard errors."""
    return {
        re.sub(r"\W+", "_", f"task_{task}_{name.partition(',')[0]}"): value
        for task, metrics in found.items()
        for name, value in metrics.items()
        if "stderr" not in name
    }
