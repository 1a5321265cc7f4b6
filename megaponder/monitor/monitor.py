"""Everything reported about a run while it trains: files and trackers by one rank, /metrics by one rank per node."""

from __future__ import annotations

from pathlib import Path

from megaponder.checkpoint import manifest
from megaponder.config.schema import RunConfig
from megaponder.monitor import console, exporter, identity, jsonl
from megaponder.monitor.memory import cuda_memory
from megaponder.monitor.phases import OUTSIDE, STEP, PhaseClock
from megaponder.monitor.registry import SKIP_REASONS
from megaponder.monitor.row import Row
from megaponder.monitor.start_end import sentence
from megaponder.monitor.throughput import Costs, Throughput
from megaponder.monitor.trackers import TensorBoard, Tracker, WandB


class Monitor:
    """Console, metrics.jsonl, trackers and endpoint; ranks that neither log nor export do nothing."""

    def __init__(self, cfg: RunConfig, total_steps: int, costs: Costs, logs: bool, clock: PhaseClock):
        self.cfg, self.total, self.logs, self.clock = cfg, total_steps, logs, clock
        self.throughput = Throughput(costs)
        self._step: dict[str, float] = {}
        """Seconds of the current step by phase, up to the last reading of the clock."""
        self._steps: list[dict[str, float]] = []
        """The same of the steps since the last row."""
        self._exporter: exporter.Exporter | None = None
        self._skipped: dict[str, int] = {}
        self._run = Path(cfg.run)
        self._trackers: list[Tracker] = []
        self._noted: dict[str, float] = {}
        self._warned: set[str] = set()

    def start(self, step: int, tokens: int, who: identity.Identity | None = None) -> None:
        """Open the files at the position where the run continues; rows beyond it are set aside.

        `who` comes from the rank that counted this start; a monitor on its own counts it itself.
        """
        if exporter.wanted(self.cfg.logging):
            made = exporter.start(self.cfg, who or identity.start(self._run), step, self.total)
            if isinstance(made, str):
                print(f"warning: {made}", flush=True)  # this rank may not be one that logs
            else:
                self._exporter = made
        if self.logs:
            moved, damaged = jsonl.rewind(self._run, step)
            if damaged:
                lines = "1 line that is not a row was" if damaged == 1 else f"{damaged} lines that are not rows were"
                self.say(f"{lines} moved to {self._run / jsonl.SUPERSEDED}.")
            if moved:
                rows = "1 row beyond step {} was" if moved == 1 else f"{moved} rows beyond step {{}} were"
                lost = "" if step else "Warning: no checkpoint of the steps before is left, so the run begins anew. "
                self.say(f"{lost}{rows.format(step)} moved to {self._run / jsonl.SUPERSEDED}.")
            if step >= self.cfg.logging.every and not jsonl.read(self._run / jsonl.NAME, jsonl.POSITION):
                self.say(
                    f"Warning: {self._run / jsonl.NAME} has no rows for the first {step} steps; the series starts here."
                )
            self._trackers = [jsonl.JsonLines(self._run)]
            if self.cfg.logging.tensorboard:
                self._trackers.append(TensorBoard(self._run, step))
            if self.cfg.logging.wandb != "off":
                self._trackers.append(WandB(self._run, self.cfg))
            self.say(self.throughput.costs.sentence())
        self.throughput.restart(step, tokens)
        self.clock.lap()
        self._step, self._steps = {}, []

    def say(self, text: str) -> None:
        """A sentence on the console."""
        if self.logs:
            print(text, flush=True)

    def warn(self, about: str, sentence: str | None) -> None:
        """A warning, printed when its condition becomes true and not again until it has been false."""
        if sentence and about not in self._warned:
            self.say(f"warning: {sentence}")
        (self._warned.add if sentence else self._warned.discard)(about)

    def stepped(self, step: int) -> dict[str, float]:
        """A step has ended; its seconds by phase."""
        self._read_clock()
        parts, self._step = self._step, {}
        self._steps.append(parts)
        if self._exporter is not None:
            self._exporter.stepped(step, sum(parts.values()), parts)
        return parts

    def started(self, seconds: dict[str, float]) -> None:
        """The process's first step has ended; what its start took, by phase."""
        self.say(sentence("to the end of the first step", seconds))
        self._noted |= {"start_seconds": sum(seconds.values())} | {f"start_{p}_seconds": s for p, s in seconds.items()}

    def seconds(self) -> float:
        """Training time of the steps since the last row."""
        return sum(sum(parts.values()) for parts in self._steps)

    def _read_clock(self) -> None:
        for phase, seconds in self.clock.lap().items():
            if phase in STEP:
                self._step[phase] = self._step.get(phase, 0.0) + seconds
            elif phase in OUTSIDE:
                self._noted[f"{phase}_seconds"] = seconds
                if self._exporter is not None:
                    self._exporter.outside(phase, seconds)

    def skipped(self, reason: str) -> None:
        """The update of the current step is skipped; `reason` is one of `registry.SKIP_REASONS`."""
        assert reason in SKIP_REASONS, reason
        self._skipped[reason] = self._skipped.get(reason, 0) + 1
        if self._exporter is not None:
            self._exporter.skipped(reason)

    def saved(self, path: Path, seconds: float) -> None:
        """The checkpoint `path` is complete, `seconds` after its save started."""
        if self._exporter is None and not self.logs:
            return  # on thousands of ranks this is never used
        size = manifest.size(path)
        self._noted["checkpoint_bytes"] = size
        if self._exporter is not None:
            self._exporter.saved(size, seconds)

    def due(self, step: int) -> bool:
        """Whether a row is written after this step."""
        return step % self.cfg.logging.every == 0 or step == self.total

    def write(self, row: Row) -> None:
        """Write a row everywhere, with what was recorded since the last one."""
        self._read_clock()
        row.values |= self._noted | {f"skipped_{reason}": n for reason, n in self._skipped.items()}
        self._noted = {}
        if "step_seconds" in row.values:  # not a row of an evaluation alone
            row.values |= self._means() | cuda_memory()
        row.values["total_steps"] = self.total
        if self._exporter is not None:
            self._exporter.take(row)
        if self.logs:
            self.say(console.line(row, self.total))
            for tracker in self._trackers:
                tracker.write(row)

    def _means(self) -> dict[str, float]:
        """Mean seconds of each phase in the steps since the last row."""
        steps, self._steps = self._steps, []
        return {f"{p}_seconds": sum(s.get(p, 0.0) for s in steps) / max(1, len(steps)) for p in STEP}

    def close(self) -> None:
        """Flush and close all trackers."""
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None
