"""`train --profile`: a trace of torch's profiler and a snapshot of GPU memory for chosen steps and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megaponder.config.schema import LoggingConfig

ROWS = 40
"""Lines of the table of operations."""


class Profile:
    """Watches the steps `logging.profile_steps` of this start, on the ranks `logging.profile_ranks`.

    Writes into RUN/profile, as soon as the last of the steps has ended: trace-rankR.json.gz (chrome://tracing, or
    ui.perfetto.dev), operations-rankR.txt, and on a GPU memory-rankR.pickle (pytorch.org/memory_viz).
    """

    def __init__(self, cfg: LoggingConfig, run: Path, rank: int, say: Callable[[str], None]):
        self._steps = tuple(cfg.profile_steps) if rank in cfg.profile_ranks else ()
        self._folder, self._rank, self._say = run / "profile", rank, say
        self._done = 0
        self._profiler: Any = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step."""
        number = self._done + 1
        if self._steps and number == self._steps[0]:
            self._start()
        try:
            yield
        finally:
            self._done = number
            if self._profiler is not None and number == self._steps[1]:
                self._write()

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(max_entries=200_000)
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()

    def _write(self) -> None:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()
        seen, self._profiler = self._profiler, None
        seen.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(self._folder / f"trace-rank{self._rank}.json.gz"))
        order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        table = seen.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=90)
        (self._folder / f"operations-rank{self._rank}.txt").write_text(table)
        if cuda:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-rank{self._rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        self._say(f"Steps {self._steps[0]} to {self._steps[1]} of this start are profiled in {self._folder}/.")
