"""The row of a step: what the monitor receives, and the warnings that follow from it."""

from __future__ import annotations

from megaponder.config.schema import RunConfig
from megaponder.engine import depth
from megaponder.engine.step import Engine, StepOutput
from megaponder.monitor.monitor import Monitor
from megaponder.monitor.pondered import Pondered
from megaponder.monitor.row import Row
from megaponder.training.budget import Budget, ends_before_the_ramp, random_is_as_good, without_effect
from megaponder.training.evaluate import Evaluation
from megaponder.training.faults import finite
from megaponder.training.schedule import Schedule
from megaponder.training.stragglers import Stragglers


class Report:
    """Makes rows.  All ranks call every method: the comparison of ranks is a collective."""

    def __init__(
        self,
        cfg: RunConfig,
        total: int,
        schedule: Schedule,
        engine: Engine,
        monitor: Monitor,
        stragglers: Stragglers,
        pondered: Pondered,
    ):
        self._engine, self._monitor, self._schedule = engine, monitor, schedule
        self._stragglers, self._pondered = stragglers, pondered
        self._empty = 0
        self._budget = Budget(engine.stage.method, cfg.logging.every)
        monitor.warn("ramp", ends_before_the_ramp(engine.stage.method, total))
        monitor.warn("options", without_effect(engine.stage.method))
        # gates start equal, which is not a collapse
        self._gates_settled = max(schedule.warmup, min(100, total // 10))

    def stepped(self, step: int) -> float:
        """A step has ended; returns its seconds."""
        seconds = self._monitor.stepped(step)
        self._stragglers.stepped(seconds.get("data", 0.0), self._engine.own_time.seconds())
        return sum(seconds.values())

    def row(self, step: int, sequences: int, tokens: int, batch: int, out: StepOutput, norm: float) -> Row:
        """Position and, if a row is due after this step, everything known about it."""
        row, monitor = Row(step, sequences, tokens), self._monitor
        self._empty += out.empty
        if not monitor.due(step):
            return row
        row.values = finite({"loss": out.loss, "grad_norm": norm}) if out.tokens else {}
        row.values |= {"empty_micro_batches": self._empty} if self._empty else {}
        row.values |= {"learning_rate": self._schedule(step), "global_batch": batch, "passes": out.passes}
        row.values |= finite({"auxiliary_loss": out.aux}) if out.aux else {}
        row.values |= finite({"z_loss": out.z_loss}) if out.z_loss and out.tokens else {}
        row.values |= finite(out.selected)
        row.values |= finite(out.balance)
        row.values |= finite(self._engine.fp8_amax())
        row.stats = finite(depth.metrics(out.stats, out.loss)) if out.tokens else {}
        share = monitor.throughput.costs.needed_share(depth.active_shares(row.stats))
        row.values |= monitor.throughput.rates(step, tokens, monitor.seconds(), share)
        if step > self._gates_settled and self._budget.decides(step):
            monitor.warn("gates", depth.collapse_warning(row.stats))
        for name, sentence in self._budget.warnings(step, row.stats).items():
            monitor.warn(name, sentence)
        values, sentence = self._stragglers.report()
        row.values |= values
        monitor.warn("stragglers", sentence)
        return row

    def add(self, row: Row, valid: Evaluation, empty: int) -> None:
        """Add an evaluation to the row of its step; `empty`: consecutive evaluations without a loss, up to this one."""
        row.values |= {"empty_evaluations": empty} if valid.loss is None else {"validation_loss": valid.loss}
        row.values |= {f"validation_loss_{name}": loss for name, loss in valid.sets.items()}
        row.stats |= {f"valid_{name}": value for name, value in valid.stats.items()}
        self._monitor.warn("policy", random_is_as_good(valid) if self._budget.decides(row.step) else None)
        if valid.by_token is not None and (sentence := self._pondered.write(row.step, valid.by_token)):
            self._monitor.say(sentence)
