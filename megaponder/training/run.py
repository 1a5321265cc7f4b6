"""The training loop."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

from megaponder.checkpoint.save import Saver
from megaponder.config.budget import batch_at, sequences_after
from megaponder.config.schema import RunConfig
from megaponder.data.stream import build_streams
from megaponder.engine import depth
from megaponder.engine.build import build_engine
from megaponder.engine.groups import Groups
from megaponder.monitor import identity
from megaponder.monitor.monitor import Monitor
from megaponder.monitor.row import Row
from megaponder.ponder.settings import method_of
from megaponder.training import setup
from megaponder.training.begin import begin
from megaponder.training.evaluate import evaluate
from megaponder.training.lock import own_run
from megaponder.training.optimizer import build_optimizer, method_only, set_lr
from megaponder.training.ranks import on_first_rank
from megaponder.training.schedule import build_schedule
from megaponder.training.step import NotFinite, optimizer_step, whole_parameters
from megaponder.training.stop import StopFlag


def run(cfg: RunConfig, groups: Groups) -> None:
    """Train on the given process groups until the budget is spent or a signal asks to stop."""
    total = cfg.train.steps
    assert total is not None
    with ExitStack() as stack:
        stop = stack.enter_context(StopFlag(groups.device))
        stack.enter_context(own_run(Path(cfg.run)))
        method = method_of(cfg)
        streams = build_streams(cfg, sequences_after(cfg, total), cfg.train.eval_batches * cfg.train.global_batch)
        engine = build_engine(setup.fitted(cfg, groups.dp_size), method, groups)
        optimizer = build_optimizer(cfg, engine.ddp)
        schedule = build_schedule(cfg.schedule, cfg.optimizer, total)
        monitor = Monitor(cfg, total, setup.costs(cfg, method, groups.world_size), groups.logs())
        state = begin(cfg, engine.stage, optimizer, monitor.say)
        checkpoints = Path(cfg.run) / "checkpoints"
        saver = Saver(checkpoints, cfg, engine.stage, optimizer, newest=state.step, published=monitor.saved)
        on_first_rank(lambda: setup.write_config(cfg))
        stack.callback(monitor.close)
        monitor.start(state.step, state.tokens, on_first_rank(lambda: identity.start(Path(cfg.run))))
        if method_only(cfg, state.step + 1):
            last, name = cfg.train.method_only_steps, cfg.ponder.method
            monitor.say(f"Up to step {last} only the parameters of {name} itself change, then all of them.")

        def save() -> None:
            with whole_parameters(engine), monitor.pause("checkpoint_seconds"):
                saver.save(state)

        signalled = 0
        while state.step < total and not (signalled := stop.agreed()):
            step, batch = state.step + 1, batch_at(cfg, state.sequences)
            lr = schedule(step)
            set_lr(optimizer, cfg, lr, step)
            with monitor.phases.phase("data"):
                batches = streams.train.micro_batches(
                    state.sequences, batch, cfg.train.micro_batch, groups.dp_rank, groups.dp_size
                )
            try:
                with monitor.phases.phase("optimizer"):
                    out, norm = optimizer_step(engine, optimizer, batches, step, method_only(cfg, step))
            except NotFinite:
                saver.wait()  # what was saved before it is sound
                raise
            monitor.stepped(step, out.seconds)
            state = state.after(batch, cfg.data.sequence_length)
            saver.poll()

            row = Row(step, state.sequences, state.tokens)
            if monitor.due(step):
                row.values = {"loss": out.loss, "grad_norm": norm, "learning_rate": lr, "global_batch": batch}
                row.values["passes"] = out.passes
                row.values |= {"auxiliary_loss": out.aux} if out.aux else {}
                row.stats = depth.metrics(out.stats, out.loss)
                share = monitor.throughput.costs.needed_share(depth.active_shares(row.stats))
                row.values |= monitor.throughput.rates(step, state.tokens, share)
                monitor.warn("gates", depth.collapse_warning(row.stats))
            if streams.valid is not None and _every(cfg.train.eval_every, step, total):
                with whole_parameters(engine), monitor.pause("evaluation_seconds"):
                    valid = evaluate(cfg, engine, streams.valid, stop)
                if valid is not None:
                    row.values["validation_loss"] = valid.loss
                    row.stats |= {f"valid_{name}": value for name, value in valid.stats.items()}
            if row.values:
                monitor.write(row)
            if _every(cfg.checkpoint.every, step, total):
                save()

        if state.step > saver.newest:
            save()
        saver.wait()
        if signalled:
            monitor.say(f"Stopped by {signal.Signals(signalled).name} after step {state.step}; it is saved.")


def _every(period: int, step: int, total: int) -> bool:
    """Whether something with this period (0: only at the end) is due after a step."""
    return step == total or (period > 0 and step % period == 0)
