"""The training loop."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from megaponder.backbone.spec import implementations
from megaponder.checkpoint.save import Saver
from megaponder.checkpoint.state import TrainState
from megaponder.config.budget import batch_at, last_step, sequences_after
from megaponder.config.schema import RunConfig
from megaponder.data.stream import Streams, build_streams
from megaponder.engine import depth
from megaponder.engine.build import build_engine
from megaponder.engine.groups import Groups
from megaponder.monitor import identity
from megaponder.monitor.monitor import Monitor
from megaponder.monitor.pondered import Pondered
from megaponder.monitor.row import Row
from megaponder.ponder.settings import method_of
from megaponder.ranks import on_first_rank
from megaponder.training import setup
from megaponder.training import stop as stopping
from megaponder.training.begin import begin
from megaponder.training.canary import check_fp8
from megaponder.training.evaluate import evaluate
from megaponder.training.faults import Faults, NotFinite, finite
from megaponder.training.heartbeat import Heartbeat
from megaponder.training.lock import own_run
from megaponder.training.optimizer import build_optimizer, method_only, set_lr
from megaponder.training.profile import Profile
from megaponder.training.record import Window, past
from megaponder.training.rollback import roll_back
from megaponder.training.schedule import build_schedule
from megaponder.training.step import optimizer_step, whole_parameters
from megaponder.training.stop import StopFlag
from megaponder.training.stragglers import Stragglers


def run(cfg: RunConfig, groups: Groups) -> int:
    """Train on the given process groups until the budget is spent or a stop is asked for; returns the exit code."""
    total, folder = cfg.train.steps, Path(cfg.run)
    assert total is not None
    with ExitStack() as stack:
        stop = stack.enter_context(StopFlag(groups.device, folder))
        stack.enter_context(own_run(folder))
        heartbeat = stack.enter_context(Heartbeat(folder, *setup.patience(cfg)))
        method = method_of(cfg)
        built = setup.graphs_that_fit(cfg, method, groups.device, groups.world_size)
        engine = build_engine(built, method, groups)
        optimizer = build_optimizer(cfg, engine.ddp)
        monitor = Monitor(cfg, total, setup.costs(cfg, method, groups.world_size), groups.logs())
        faults = Faults(cfg.faults, folder, monitor.say, groups.device)
        profile = stack.enter_context(Profile(cfg.logging, folder, groups.rank, partial(print, flush=True)))
        stragglers = Stragglers(cfg.faults.straggler_ratio, groups.device)
        state = begin(cfg, engine.stage, optimizer, monitor.say)
        total = monitor.total = last_step(cfg, state.step, state.sequences, state.tokens)
        schedule = build_schedule(cfg.schedule, cfg.optimizer, total)
        left_out = faults.record.left_out()
        streams = _streams(cfg, total, state, left_out)
        saver = Saver(folder / "checkpoints", cfg, engine.stage, optimizer, newest=state.step, published=monitor.saved)
        on_first_rank(lambda: setup.write_config(cfg))
        stack.callback(monitor.close)
        who = on_first_rank(lambda: identity.start(folder))
        monitor.start(state.step, state.tokens, who)
        pondered = Pondered(cfg, state.step, groups.logs())
        monitor.say(implementations(built))
        if built is not cfg:
            monitor.say(
                "Captured passes would not fit in this GPU's memory by the plan; cuda_graphs: true insists on them."
            )
        if method_only(cfg, state.step + 1):
            last, name = cfg.train.method_only_steps, cfg.ponder.method
            monitor.say(f"Up to step {last} only the parameters of {name} itself change, then all of them.")

        def save() -> None:
            heartbeat.enter("save")
            with whole_parameters(engine), monitor.pause("checkpoint_seconds"):
                saver.save(state)

        if state.step >= total:
            monitor.say(f"There is nothing to do: the budget of {total} steps is spent, and {state.step} are done.")
        profile.expect(total - state.step)
        asked, unchecked = 0, True
        while state.step < total:
            step, batch = state.step + 1, batch_at(cfg, state.sequences)
            state = replace(state, sequences=past(left_out, state.sequences, batch))
            heartbeat.enter("data", step)
            with stragglers.reading(), monitor.phases.phase("data"):
                batches = stop.wait(
                    streams.train.fetch(state.sequences, batch, cfg.train.micro_batch, groups.dp_rank, groups.dp_size)
                )
            heartbeat.enter("agree")
            if (asked := stop.agreed()) or batches is None:
                break
            if unchecked:
                unchecked = False
                check_fp8(cfg, engine, batches, monitor.say)
            lr = schedule(step)
            set_lr(optimizer, cfg, lr, step)
            with profile.step(), monitor.phases.phase("optimizer"):
                out, norm = optimizer_step(
                    engine, optimizer, batches, step, partial(faults.takes, state), heartbeat.enter,
                    method_only(cfg, step),
                )  # fmt: skip
            monitor.stepped(step, out.seconds)
            try:
                state = faults.after(state, state.after(batch, cfg.data.sequence_length), out.loss, norm)
            except NotFinite:
                saver.wait()  # what was saved before it is sound
                raise
            if faults.streak:
                monitor.skipped(faults.reason)
            stragglers.computed(engine.own_time.seconds())
            saver.poll()
            if faults.must_roll_back():
                heartbeat.enter("start")
                state = roll_back(engine, optimizer, saver, faults, folder / "checkpoints")
                left_out = faults.record.left_out()
                streams = _streams(cfg, total, state, left_out)
                monitor.close()
                monitor.start(state.step, state.tokens, who)
                continue

            row = Row(step, state.sequences, state.tokens)
            if monitor.due(step):
                row.values = finite({"loss": out.loss, "grad_norm": norm})
                row.values |= {"learning_rate": lr, "global_batch": batch, "passes": out.passes}
                row.values |= finite({"auxiliary_loss": out.aux}) if out.aux else {}
                row.values |= finite(engine.fp8_amax())
                row.stats = finite(depth.metrics(out.stats, out.loss))
                share = monitor.throughput.costs.needed_share(depth.active_shares(row.stats))
                row.values |= monitor.throughput.rates(step, state.tokens, share)
                if step > max(schedule.warmup, min(100, total // 10)):  # gates start equal, which is no collapse
                    monitor.warn("gates", depth.collapse_warning(row.stats))
                values, sentence = stragglers.report()
                row.values |= values
                monitor.warn("stragglers", sentence)
            if streams.valid is not None and _every(cfg.train.eval_every, step, total):
                with whole_parameters(engine), monitor.pause("evaluation_seconds"):
                    valid = evaluate(cfg, engine, streams.valid, stop, lambda: heartbeat.enter("evaluate"))
                if valid is not None:
                    row.values["validation_loss"] = valid.loss
                    row.stats |= {f"valid_{name}": value for name, value in valid.stats.items()}
                    if valid.by_token is not None and (sentence := pondered.write(step, valid.by_token)):
                        monitor.say(sentence)
            if row.values:
                monitor.write(row)
            if _every(cfg.checkpoint.every, step, total) and not faults.streak:  # what a rollback finds is older
                save()

        if state.step > saver.newest:
            save()
        saver.wait()
        if asked:
            what = (
                f"after step {state.step}; it is saved"
                if state.step
                else "before the first step; there is nothing to save"
            )
            monitor.say(f"Stopped by {stopping.words(asked)} {what}.")
            if asked == stopping.STOP_FILE:
                on_first_rank(stop.clear)
        engine.close()
        return stopping.EXIT_CODES.get(asked, 0)


def _streams(cfg: RunConfig, total: int, state: TrainState, left_out: list[Window]) -> Streams:
    """The run's data: what it has consumed, maybe with another batch, what it still needs, and what it leaves out."""
    needed = sequences_after(cfg, max(0, total - state.step), state.sequences)
    # a batch that would touch a window begins behind it
    needed += sum(end - first + cfg.train.global_batch - 1 for first, end in left_out if end > state.sequences)
    return build_streams(cfg, needed, cfg.train.eval_batches * cfg.train.global_batch)


def _every(period: int, step: int, total: int) -> bool:
    """Whether something with this period (0: only at the end) is due after a step."""
    return step == total or (period > 0 and step % period == 0)
