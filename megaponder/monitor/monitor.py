"""Everything that is written about a run while it trains, by the one rank that sees the loss."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megaponder.config.schema import RunConfig
from megaponder.monitor import console, jsonl
from megaponder.monitor.row import Row
from megaponder.monitor.throughput import Costs, Throughput
from megaponder.monitor.trackers import TensorBoard, Tracker, WandB, run_id


class Monitor:
    """Console, metrics.jsonl and trackers; on ranks that do not log it does nothing."""

    def __init__(self, cfg: RunConfig, total_steps: int, costs: Costs, logs: bool):
        self.cfg, self.total, self.logs = cfg, total_steps, logs
        self.throughput = Throughput(costs)
        self._run = Path(cfg.run)
        self._trackers: list[Tracker] = []
        self._noted: dict[str, float] = {}
        self._warned: set[str] = set()

    def start(self, step: int, tokens: int) -> None:
        """Open the files at the position from which the run goes on; rows beyond it are set aside."""
        if self.logs:
            run_id(self._run)
            moved = jsonl.rewind(self._run, step)
            if moved:
                rows = "1 row beyond step {} was" if moved == 1 else f"{moved} rows beyond step {{}} were"
                self.say(f"{rows.format(step)} moved to {self._run / jsonl.SUPERSEDED}.")
            self._trackers = [jsonl.JsonLines(self._run)]
            if self.cfg.logging.tensorboard:
                self._trackers.append(TensorBoard(self._run, step))
            if self.cfg.logging.wandb != "off":
                self._trackers.append(WandB(self._run, self.cfg))
            self.say(self.throughput.costs.sentence())
        self.throughput.restart(step, tokens)

    def say(self, text: str) -> None:
        """A sentence on the console."""
        if self.logs:
            print(text, flush=True)

    def warn(self, about: str, sentence: str | None) -> None:
        """A warning, said when it begins to hold and not again until it has ceased to."""
        if sentence and about not in self._warned:
            self.say(f"warning: {sentence}")
        (self._warned.add if sentence else self._warned.discard)(about)

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Time spent inside does not count as training; the next row tells it as `name`."""
        begin = time.perf_counter()
        yield
        self._noted[name] = time.perf_counter() - begin
        self.throughput.pause(self._noted[name])

    def due(self, step: int) -> bool:
        """Whether a row is written after this step."""
        return step % self.cfg.logging.every == 0 or step == self.total

    def write(self, row: Row) -> None:
        """A row to every place, with what was noted since the last one."""
        row.values |= self._noted
        self._noted = {}
        if self.logs:
            self.say(console.line(row, self.total))
            for tracker in self._trackers:
                tracker.write(row)

    def close(self) -> None:
        """Flush and close all trackers."""
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
