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

    Writes into RUN/profile as soon as the last of the steps, or the run, has ended: trace-rankR.json.gz
    (chrome://tracing, or ui.perfetto.dev), operations-rankR.txt, and on a GPU memory-rankR.pickle
    (pytorch.org/memory_viz).  Used as a context around all steps.
    """

    def __init__(self, cfg: LoggingConfig, run: Path, rank: int, say: Callable[[str], None]):
        self._steps = tuple(cfg.profile_steps) if rank in cfg.profile_ranks else ()
        self._folder, self._rank, self._say = run / "profile", rank, say
        self._done = 0
        self._profiler: Any = None

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._profiler is None:
            return
        if kind is None:
            self._write()
        else:
            self._profiler.stop()  # otherwise the process would crash at exit

    def expect(self, steps: int) -> None:
        """Report if this start's `steps` end before the first profiled one."""
        if self._steps and steps < self._steps[0]:
            first, last = self._steps
            self._say(
                f"Nothing will be profiled: logging.profile_steps are {first} to {last}, and this start has {steps}."
            )

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step."""
        self._done += 1
        if self._steps and self._done == self._steps[0]:
            self._start()
        yield
        if self._profiler is not None and self._done == self._steps[1]:
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
        """Write what was recorded so far; a profile that cannot be written must not end the run."""
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()
        seen, self._profiler = self._profiler, None
        seen.stop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            seen.export_chrome_trace(str(self._folder / f"trace-rank{self._rank}.json.gz"))
            order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
            table = seen.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=90)
            (self._folder / f"operations-rank{self._rank}.txt").write_text(table)
            if cuda:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-rank{self._rank}.pickle"))
        except OSError as error:
            self._say(f"warning: the profile cannot be written: {error}.")
        else:
            steps = f"Steps {self._steps[0]} to {self._done}" if self._done > self._steps[0] else f"Step {self._done}"
            self._say(f"{steps} of this start: a profile is in {self._folder}/.")
        if cuda:
            torch.cuda.memory._record_memory_history(enabled=None)
