"""A new run that goes on from a checkpoint of another one: with everything, so that its first step is the next one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from megaponder import files
from megaponder.checkpoint import choose, folder, origin
from megaponder.checkpoint.damage import damage
from megaponder.checkpoint.state import CONFIG, TrainState, load_saved_config, load_state
from megaponder.config.budget import last_step
from megaponder.config.load import BUDGETS, dump, load_config
from megaponder.config.overrides import parse_overrides
from megaponder.config.resolve import resolve
from megaponder.config.schema import PonderConfig, RunConfig
from megaponder.errors import ConfigError, UserError
from megaponder.monitor import jsonl
from megaponder.ponder.registry import methods
from megaponder.ponder.settings import method_of, with_routers, with_stated_options
from megaponder.training.schedule import build_schedule
from megaponder.training.setup import refuse_other_model


@dataclass(frozen=True)
class Branch:
    """What was written."""

    run: Path
    step: int
    last: int
    """Step at which its budget is spent."""
    rate: float | None
    """With a cooldown, the learning rate at its start."""

    def __str__(self) -> str:
        rate = "" if self.rate is None else f"; the learning rate falls from {self.rate:g} to 0"
        return (
            f"{self.run}: continues after step {self.step} up to step {self.last}{rate}.\n"
            f"Train it: megaponder train {self.run / CONFIG}"
        )


def branch(
    run: str | Path, step: int | str, out: str | Path, cooldown: int | None = None, overrides: Sequence[str] = ()
) -> Branch:
    """Write the run folder `out`: the checkpoint of `step` of `run`, its configuration and its metrics up to there.

    `cooldown`: the learning rate falls from what it is there to 0 over so many steps, and then the run ends.
    `overrides` are words such as ["--train.steps", "2000"] and win; a cooldown sets schedule and budget itself.  Files
    are linked where the file system can, so a branch takes no space of its own and does not need the old run.
    UserError for a step that has no intact checkpoint with optimizer state, for a folder that is not empty, and for a
    change with which no run could go on from there; nothing is written then.
    """
    run, out = Path(run), Path(out)
    if cooldown is not None and cooldown < 1:
        raise ConfigError("--cooldown", cooldown, "it must be at least 1", "the nearest is 1")
    if any(word.partition("=")[0] == "--run" for word in overrides):
        raise UserError(f"--run: the folder of the branch is --out = {out}; leave --run out.")
    if cooldown is not None:
        _refuse_other_rates(cooldown, overrides)
    source = _checkpoint(run, step)
    step = folder.step_of(source)
    files.refuse_lost_link(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out = {out}: it exists already; choose another folder.")
    cfg = load_saved_config(source)
    state = load_state(source)[0]
    own_cache = cfg.data.cache == f"{cfg.run.rstrip('/')}/cache"
    if own_cache:  # the branch must not need the old run's
        cfg.data.cache = None
    cfg.run = str(out)
    if cooldown is not None:
        cfg = _cooling(cfg, state, cooldown)
    before = cfg.ponder
    with TemporaryDirectory() as scratch:
        dump(cfg, Path(scratch) / CONFIG)
        cfg = resolve(load_config(Path(scratch) / CONFIG, list(overrides)))
    _refuse_other_model(cfg, before, source)
    last = last_step(cfg, state.step, state.sequences, state.tokens)
    if last <= state.step:
        rule = f"the branch begins at step {state.step}, where this budget is spent"
        raise ConfigError("train.steps", last, rule, f"the nearest is {state.step + 1}, or use --cooldown N")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        target = folder.final(temporary / "checkpoints", step)
        target.parent.mkdir(parents=True)
        shutil.copytree(source, target, copy_function=_link)
        for arrays in (run / "cache").glob("order-*") if own_cache else ():
            if arrays.is_dir() and not arrays.suffix:
                shutil.copytree(arrays, temporary / "cache" / arrays.name, copy_function=_link)
        origin.record(temporary, "branch", source)
        dump(cfg, temporary / CONFIG)
        if (run / jsonl.NAME).is_file():
            shutil.copyfile(run / jsonl.NAME, temporary / jsonl.NAME)
            jsonl.rewind(temporary, step)
            (temporary / jsonl.SUPERSEDED).unlink(missing_ok=True)  # the old run has these rows
        if out.exists():
            out.rmdir()
        temporary.rename(out)
        files.sync(out.parent)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Branch(out, step, last, None if cooldown is None else cfg.optimizer.lr)


def _refuse_other_rates(cooldown: int, overrides: Sequence[str]) -> None:
    """With another schedule or budget than its own, a cooldown would not be one."""
    for name, value in parse_overrides(list(overrides)).items():
        if name.startswith("schedule.") or name in BUDGETS:
            sets = "the schedule and the budget (schedule.*, train.steps, train.tokens) itself"
            rule = f"--cooldown {cooldown} sets {sets}"
            raise ConfigError(f"--{name}", value, rule, "leave it out, or leave out --cooldown")


def _refuse_other_model(cfg: RunConfig, before: PonderConfig, source: Path) -> None:
    """ConfigError for what the run itself would refuse when it goes on from the checkpoint; it gives the warnings."""
    if cfg.ponder.method == before.method:
        cfg = with_stated_options(cfg, before)
        if cfg.ponder.method in methods():
            cfg = with_routers(cfg, method_of(cfg))
    refuse_other_model(cfg, source)


def _checkpoint(run: Path, step: int | str) -> Path:
    """The checkpoint of a step, or of the word that names one; the path may also be the checkpoint itself."""
    there = {int(p.name.removeprefix("step_")): p for p in choose.named(run).candidates if p.name.startswith("step_")}
    steps = sorted(there)
    try:
        wanted = int(step)
    except ValueError:
        has = f"has {', '.join(map(str, steps))}" if steps else "has none"
        raise UserError(f"STEP = {step}: give a step; {run} {has}.") from None
    if wanted not in there:
        near = f"the nearest is {min(steps, key=lambda s: abs(s - wanted))}" if steps else "it has none"
        listed = f" (it has {', '.join(map(str, steps))})" if len(steps) > 1 else ""
        raise UserError(f"STEP = {step}: {run} has no checkpoint of this step; {near}{listed}.")
    found = there[wanted]
    if (reason := damage(found)) is not None:
        raise UserError(f"Checkpoint {found} cannot be used because {reason}.")
    if not load_state(found)[1].optimizer:
        raise UserError(
            f"STEP = {step}: {found} holds weights without optimizer state, so there is nothing to continue; "
            f"start a run from it with --checkpoint.load {run}."
        )
    return found


def _cooling(cfg: RunConfig, state: TrainState, cooldown: int) -> RunConfig:
    """The configuration of a run that decays to 0 over its last `cooldown` steps, from the rate that it has now."""
    before = build_schedule(cfg.schedule, cfg.optimizer, last_step(cfg, state.step, state.sequences, state.tokens))
    if state.step < before.warmup:
        raise UserError(
            f"STEP = {state.step}: the learning rate still rises up to step {before.warmup}; the nearest step that can "
            f"cool down is {before.warmup}."
        )
    rate = before(state.step)
    if rate <= 0:
        raise UserError(f"STEP = {state.step}: the learning rate is 0 there already; choose an earlier step.")
    total = state.step + cooldown
    schedule = replace(
        cfg.schedule,
        kind="wsd",
        warmup_fraction=before.warmup / total,
        decay_fraction=cooldown / total,
        min_lr_fraction=0.0,
    )
    return replace(
        cfg,
        optimizer=replace(cfg.optimizer, lr=rate),
        schedule=schedule,
        train=replace(cfg.train, steps=total, tokens=None, epochs=None),
    )


def _link(source: str, target: str) -> str:
    """A second name for a file, or a copy where the file system has none."""
    source = os.path.realpath(source)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target
