"""The training loop, and what comes after it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from megaponder.checkpoint.local import Local
from megaponder.config.schema import RunConfig
from megaponder.engine.groups import Groups
from megaponder.monitor.row import Row
from megaponder.monitor.start_end import ending, started, starting
from megaponder.ranks import on_first_rank
from megaponder.training import adaptive_alpha, tasks
from megaponder.training import stop as stopping
from megaponder.training.build import Run, build
from megaponder.training.evaluate import evaluate
from megaponder.training.faults import NotFinite
from megaponder.training.optimizer import drop_backbone_gradients, method_only, set_lr
from megaponder.training.rollback import roll_back
from megaponder.training.shortage import worth_another_start
from megaponder.training.step import gradient_norm, update


def run(cfg: RunConfig, groups: Groups) -> int:
    """Train on the given process groups until the budget is spent or a stop is asked for; returns the exit code."""
    with worth_another_start() as start, ExitStack() as stack:
        parts = build(cfg, groups, stack)
        first = parts.state.step
        start.has_worked = lambda: parts.state.step > first
        try:
            asked = loop(parts)
        except NotFinite:
            parts.saver.wait()  # a checkpoint that is being written is valid
            raise
        return finish(parts, asked)


def loop(run: Run) -> int:
    """Steps until the budget is spent (returns 0) or all ranks agree to stop (what asked for it)."""
    cfg, clock, engine, optimizer, faults = run.cfg, run.clock, run.engine, run.optimizer, run.faults
    starting("first_step")
    if run.state.evaluation_due:
        catch_up(run)
    while run.state.step < run.total and not faults.starved:
        before = run.batches.skip_left_out(run.state)
        step = before.step + 1
        clock.enter("data", step)
        batches = run.stop.wait(run.batches.fetch(before))
        clock.enter("agree")
        if (asked := run.stop.agreed()) or batches is None:
            return asked
        run.canary.check(batches)

        with run.profile.step():
            clock.enter("forward_backward")
            engine.zero_grad()
            optimizer.zero_grad()
            adaptive_alpha.prepare(cfg, engine, before)
            out = engine.forward_backward(batches, step, train=True)
            if method_only(cfg.train, step):
                drop_backbone_gradients(engine.stage)

            clock.enter("optimizer")
            set_lr(optimizer, cfg, run.schedule(step), step)
            norm = gradient_norm(optimizer)
            taken = faults.takes(before, out, norm)
            if taken:
                update(optimizer, norm)
                if run.ema is not None:
                    run.ema.update()
                engine.settle(out, step)

        clock.enter("report")
        batch = run.batches.size(before)
        seconds = run.report.stepped(step)
        if (start := started()) is not None:
            run.monitor.started(start)
        after = before.after(batch, cfg.data.sequence_length)
        after = run.spent.add(after, batch * cfg.data.sequence_length, out, seconds)
        if taken:
            after = adaptive_alpha.follow(cfg, before, after, out)
        run.state = state = faults.after(before, after, out.loss, norm, run.batches.source)
        if faults.reason:
            run.monitor.skipped(faults.reason)
        run.saver.poll()
        if faults.must_roll_back():
            roll_back(run)
            continue

        row = run.report.row(step, state.sequences, state.tokens, batch, out, norm)
        run.state = state = replace(state, evaluation_due=not validate(run, row))
        write(run, row)
        saves = not faults.skips  # a rollback must find good weights
        if cfg.train.tasks and saves and _every(cfg.train.tasks_every, step, run.total):
            save(run)
            with clock.phase("evaluation"):
                write(run, Row(step, state.sequences, state.tokens, tasks.evaluate(run)))
        elif saves and _every(cfg.checkpoint.every, step, run.total):
            save(run)
        elif saves and run.local is not None and _every(cfg.checkpoint.local_every, step, run.total):
            save_locally(run, run.local)
    return run.stop.agreed() if run.state.evaluation_due else 0  # another start does the last evaluation


def validate(run: Run, row: Row) -> bool:
    """Add the evaluation that is due after the row's step, if one is; False if a request to stop interrupted it."""
    train, clock, step = run.cfg.train, run.clock, row.step
    by_depth = train.eval_depths_every > 0 and _every(train.eval_depths_every, step, run.total)
    if not run.batches.valid or not (by_depth or _every(train.eval_every, step, run.total)):
        return True
    with run.engine.whole_parameters(), clock.phase("evaluation"):
        valid = evaluate(run.cfg, run.engine, run.batches.valid, run.stop, lambda: clock.enter("evaluation"), by_depth)
    if valid is None:
        return False
    run.report.add(row, valid, run.faults.evaluated(step, valid.loss, run.batches.valid))
    return True


def catch_up(run: Run) -> None:
    """Do the evaluation that the run's last stop interrupted; its values join the row of their step."""
    row = Row(run.state.step, run.state.sequences, run.state.tokens)
    run.state = replace(run.state, evaluation_due=not validate(run, row))
    write(run, row)


def write(run: Run, row: Row) -> None:
    """Write a row that has values, with what the run has spent up to here."""
    if row.values:
        row.values |= run.spent.told(run.state)
        run.monitor.write(row)


def save(run: Run) -> None:
    """Start a checkpoint of the current position, and report whether the data are still the same."""
    changes = run.data.look()
    for sentence in changes:
        run.faults.record.append("data_changed", step=run.state.step, what=sentence)
    run.monitor.warn("data", " ".join(f"{sentence}." for sentence in changes) or None)
    with run.engine.whole_parameters(), run.clock.phase("checkpoint"):
        run.saver.save(run.state)


def save_locally(run: Run, local: Local) -> None:
    """This rank's local checkpoint, which a restart finds instead of the run folder's last one."""
    with run.engine.whole_parameters(), run.clock.phase("checkpoint"):
        local.save(run.state, run.data.stored(), partial(print, file=sys.stderr, flush=True))


def finish(run: Run, asked: int) -> int:
    """Save what is not saved yet, say why the run ends, and return its exit code; UserError where data end it."""
    run.state = run.faults.sound or run.state
    if run.state.step > run.saver.newest:
        save(run)
    run.saver.wait()
    ending("engine")
    if run.faults.starved:
        run.engine.close()
        raise run.faults.starved_after(run.state.step)
    if run.stop.agreed() == stopping.UNREADABLE:  # in the last evaluation, too
        run.engine.close()
        raise run.stop.unreadable(run.state.step)
    if asked:
        saved = f"after step {run.state.step}; it is saved"
        nothing = "before the first step; there is nothing to save"
        run.monitor.say(f"Stopped by {stopping.words(asked)} {saved if run.state.step else nothing}.")
        if asked == stopping.STOP_FILE:
            on_first_rank(run.stop.clear)
    run.engine.close()
    ending("monitor")
    return stopping.EXIT_CODES.get(asked, 0)


def _every(period: int, step: int, total: int) -> bool:
    """Whether something with this period (0: only at the end) is due after a step."""
    return step == total or (period > 0 and step % period == 0)
