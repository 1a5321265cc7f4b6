"""Device time between two points, measured without synchronising."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Between `start` and `stop`: CUDA events on a GPU, which runs asynchronously, otherwise the clock."""

    def __init__(self, device: torch.device):
        self._gpu = device.type == "cuda"
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._gpu else []
        self._begin = self._end = 0.0

    def start(self) -> None:
        """The first point."""
        self._mark(0)
        self._begin = self._end = time.perf_counter()

    def stop(self) -> None:
        """The second point."""
        self._mark(1)
        self._end = time.perf_counter()

    def seconds(self) -> float:
        """Seconds between the last start and stop; read after the step, when a GPU has passed both."""
        if self._gpu:
            self._marks[1].synchronize()
            return self._marks[0].elapsed_time(self._marks[1]) / 1000
        return self._end - self._begin

    def _mark(self, i: int) -> None:
        if self._gpu:
            self._marks[i].record()
