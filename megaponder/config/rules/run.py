"""Rules on optimizer, schedule, budget, checkpoints and logging."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from megaponder import files
from megaponder.config import budget
from megaponder.config.fields import all_fields, value_of
from megaponder.config.rules.case import Case, Rule, nearest_multiple, require
from megaponder.config.schema import RunConfig
from megaponder.config.trained import GROUPS, OF_LAYERS, OF_MIXTURES


def budget_is_given_once(c: Case) -> None:
    """Steps, tokens or epochs, and where steps are written too they agree (a resolved configuration has both)."""
    t = c.cfg.train
    rule = "its steps follow from the datasets of data.train, which are not here"
    require(t.epochs is None or t.steps is not None, "train.epochs", t.epochs, rule, "set train.steps instead")
    rule = f"train.tokens = {t.tokens} sets the budget, too"
    require(t.epochs is None or t.tokens is None, "train.epochs", t.epochs, rule, "set one of the two to null")
    require(
        t.steps is not None or t.tokens is not None,
        "train.steps",
        None,
        "a run needs a budget",
        "set it, train.tokens or train.epochs",
    )
    if t.steps is not None and t.tokens is not None:
        steps = budget.steps_for_tokens(c.cfg, t.tokens)
        rule = f"train.tokens = {t.tokens} is {steps} steps, and only one of the two may set the budget"
        require(t.steps == steps, "train.steps", t.steps, rule, "set the other one to null")


def rampup_is_three_numbers(c: Case) -> None:
    """[start, increment, sequences], and equal increments end at the full batch."""
    ramp, full = c.cfg.train.batch_rampup, c.cfg.train.global_batch
    if ramp is None:
        return
    field = "train.batch_rampup"
    ok = len(ramp) == 3 and min(ramp) >= 1
    require(
        ok,
        field,
        ramp,
        "it must be three positive integers [start, increment, sequences]",
        f"for example [{max(1, full // 8)}, {max(1, full // 8)}, {100 * full}]",
    )
    start, increment, length = ramp
    rule = f"it must start below train.global_batch = {full}"
    require(start < full, field, ramp, rule, "omit it to start with the full batch")
    near = full - max(1, round((full - start) / increment)) * increment
    near = near if near > 0 else full - increment
    fix = f"the nearest is [{near}, {increment}, {length}]" if near > 0 else "use a smaller increment"
    rule = f"full increments of {increment} must lead from {start} to train.global_batch = {full}"
    require((full - start) % increment == 0, field, ramp, rule, fix)


def method_only_needs_parameters(c: Case) -> None:
    """A method without parameters of its own has none that could be trained first."""
    steps, method = c.cfg.train.method_only_steps, c.cfg.ponder.method
    rule = f"method {method} has no parameters of its own to train alone"
    require(steps == 0 or c.facts.has_parameters, "train.method_only_steps", steps, rule, "use 0")
    if c.facts.frozen and c.cfg.train.steps:
        rule = f"with these options {method} trains its own parameters alone, in every step"
        require(steps >= c.cfg.train.steps, "train.method_only_steps", steps, rule, f"use {c.cfg.train.steps}")
    lr, rule = c.cfg.train.method_lr, "it is the rate of the first train.method_only_steps, of which there are none"
    require(lr is None or steps > 0, "train.method_lr", lr, rule, "leave it out, or set train.method_only_steps")


def tuned_width_scales_the_head(c: Case) -> None:
    """Over width the head's rate and initial weights fall, and those of the token table do not."""
    o = c.cfg.optimizer
    rule = "model.tie_embeddings makes one table of the token table and the head, which need different rates"
    fix = "set model.tie_embeddings: false, or leave it out"
    require(o.tuned_width is None or not c.cfg.model.tie_embeddings, "optimizer.tuned_width", o.tuned_width, rule, fix)


def tuned_wider(cfg: RunConfig) -> str:
    """A sentence if the rate was tuned on a wider model than this one; empty otherwise."""
    tuned, width = cfg.optimizer.tuned_width, cfg.model.hidden_size
    if tuned is None or width is None or tuned <= width:
        return ""
    return (
        f"optimizer.tuned_width = {tuned} is more than model.hidden_size = {width}: rates and initial weights of a "
        "wider model are scaled up to this one, the reverse of tuning on a narrower one."
    )


def trained_groups_exist(c: Case) -> None:
    """What alone is trained is known, is there, and lies on every pipeline stage."""
    only, name = c.cfg.train.only, "train.only"
    if not only:
        return
    for group in only:
        near = difflib.get_close_matches(group, GROUPS, 1)
        require(group in GROUPS, name, group, f"groups are {', '.join(GROUPS)}", f"use {near[0] if near else 'mlp'}")
        there = bool(c.cfg.model.moe) or group not in OF_MIXTURES
        require(there, name, group, "only a mixture of experts (model.moe) has it", "use mlp")
        there = c.facts.has_parameters or group != "method"
        require(there, name, group, f"{c.cfg.ponder.method} has no parameters of its own", "leave it out")
    rule = f"every layer needs something that is trained: {', '.join(OF_LAYERS)}"
    require(any(g in OF_LAYERS for g in only), name, only, rule, "add one, or use train.method_only_steps")
    steps, rule = c.cfg.train.method_only_steps, f"train.only = {only} has no method"
    require(not steps or "method" in only, "train.method_only_steps", steps, rule, "use 0, or add method")
    fp8, rule = c.cfg.precision.fp8, "FP8 weights that are not trained are not built"
    require(fp8 == "none", "precision.fp8", fp8, rule, "use none, or train.only: []")
    graphs, rule = c.cfg.precision.cuda_graphs, "captured passes with weights that are not trained are not built"
    require(graphs is not True, "precision.cuda_graphs", graphs, rule, "use auto or false")


def warmup_and_decay_fit(c: Case) -> None:
    """Under wsd, warm-up and final fall share the budget."""
    s = c.cfg.schedule
    total = s.warmup_fraction + s.decay_fraction
    ok = s.kind != "wsd" or total <= 1
    rule = f"with schedule.warmup_fraction = {s.warmup_fraction} it is more than the whole budget"
    fix = f"the nearest is {1 - s.warmup_fraction:g}"
    require(ok, "schedule.decay_fraction", s.decay_fraction, rule, fix)


def kept_checkpoints_are_written(c: Case) -> None:
    """A step that is to be kept forever is a step at which one is saved."""
    p = c.cfg.checkpoint
    if p.keep_every:
        rule = f"it must be a multiple of checkpoint.every = {p.every}, or none is ever kept"
        near = nearest_multiple(p.keep_every, p.every) if p.every else 0
        ok = p.every > 0 and p.keep_every % p.every == 0
        require(ok, "checkpoint.keep_every", p.keep_every, rule, f"the nearest is {near}")


def texts_are_not_empty(c: Case) -> None:
    """An empty path, as from an unset shell variable, would mean the current folder."""
    for name, field in all_fields().items():
        if field.type == str | None:
            value = value_of(c.cfg, name)
            ok = value is None or bool(value.strip())
            require(ok, name, value, "it is empty, as an unset shell variable is", "set it, or leave it out (null)")


def local_checkpoints_have_a_place(c: Case) -> None:
    """A folder for local checkpoints and their period go together."""
    p = c.cfg.checkpoint
    rule = f"it needs checkpoint.local, a folder on a disk of each node, and that is {p.local!r}"
    require(p.local is not None or not p.local_every, "checkpoint.local_every", p.local_every, rule, "use 0")
    rule = "no local checkpoint would be written, since checkpoint.local_every is 0"
    fix = f"set checkpoint.local_every, for example to {max(1, p.every // 10)}"
    require(p.local is None or p.local_every > 0, "checkpoint.local", p.local, rule, fix)


def rollback_follows_skips(c: Case) -> None:
    """Going back happens after skipped steps, so some fault must lead to a skip; data are left out after going back."""
    f = c.cfg.faults
    rule = "no fault leads to a skipped step, and only skipped steps are counted"
    skips = "skip" in (f.not_finite, f.spike)
    require(f.rollback_after == 0 or skips, "faults.rollback_after", f.rollback_after, rule, "use faults.spike: skip")
    rule = "data are skipped only after a rollback to a checkpoint"
    require(not f.skip_data or f.rollback_after > 0, "faults.skip_data", True, rule, "set faults.rollback_after: 3")


def hangs_are_named_in_time(c: Case) -> None:
    """The process groups' time-out ends the ranks, and then none is left to name the stalled one."""
    hang, limit = c.cfg.faults.hang_minutes, c.cfg.parallel.timeout_minutes
    ok = hang is None or 0 < hang < limit
    rule = f"it must be more than 0 and less than parallel.timeout_minutes = {limit:g}"
    require(ok, "faults.hang_minutes", hang, rule, f"half of it is {limit / 2:g}")


def load_can_be_used(c: Case) -> None:
    """Weights to start from are useless if the run folder's own checkpoint is required."""
    p = c.cfg.checkpoint
    rule = "it is never used with checkpoint.resume = must"
    require(p.load is None or p.resume != "must", "checkpoint.load", p.load, rule, "use checkpoint.resume: auto")
    if p.load is not None and c.needs_data:
        rule = "this is a file" if Path(p.load).is_file() else "there is no such folder"
        require(Path(p.load).is_dir(), "checkpoint.load", p.load, rule, "set it to a checkpoint folder")


def changed_fields_may_change(c: Case) -> None:
    """With another value of most of the model's fields, the loaded weights would mean something else."""
    p, name = c.cfg.checkpoint, "checkpoint.load_changes"
    may = [field.name for field in all_fields().values() if field.declared.change_at_load == "asked"]
    for one in p.load_changes:
        require(one in may, name, one, "it may not differ from the checkpoint's", f"these may: {', '.join(may)}")
    require(p.load is not None or not p.load_changes, name, p.load_changes, "nothing is loaded", "set checkpoint.load")


def profiled_steps_are_a_pair(c: Case) -> None:
    """First and last, from 1."""
    steps = c.cfg.logging.profile_steps
    ok = not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1])
    rule = "it must be empty, or the first and the last step, counted from 1"
    require(ok, "logging.profile_steps", steps, rule, "use [4, 5]")
    ranks, last = c.cfg.logging.profile_ranks, c.world_size - 1
    ok = last < 0 or all(0 <= rank <= last for rank in ranks)
    require(ok, "logging.profile_ranks", ranks, f"it must name ranks from 0 to {last}", "use [0]")


def run_is_a_folder(c: Case) -> None:
    """The run folder may be absent, but no file may have its name, or that of a folder in it that will be needed."""
    path = Path(c.cfg.run)
    require(bool(c.cfg.run.strip()), "run", c.cfg.run, "it must be a folder", "for example runs/first")
    ok = path.absolute() != Path(path.anchor or "/")
    require(ok, "run", c.cfg.run, "it is the root of the file system", "for example runs/first")
    ok = not path.exists() or path.is_dir()
    require(ok, "run", c.cfg.run, "a file has this name", f"for example {c.cfg.run}-run")
    for child in sorted(path.iterdir()) if path.is_dir() and os.access(path, os.R_OK | os.X_OK) else []:
        require(not files.is_special(child), "run", c.cfg.run, f"{child} is a pipe or a device", "move it away")
    saved = path / "checkpoints"
    ok = not saved.exists() or saved.is_dir()
    require(ok, "run", c.cfg.run, f"{saved} is a file, so no checkpoint could be saved", "move it away")
    profile, steps = path / "profile", c.cfg.logging.profile_steps
    rule = f"{profile} is a file, and profiles are written into a folder of this name"
    require(not steps or not profile.is_file(), "logging.profile_steps", steps, rule, "remove it")


RULES: tuple[Rule, ...] = (
    texts_are_not_empty,
    rampup_is_three_numbers,
    budget_is_given_once,
    method_only_needs_parameters,
    tuned_width_scales_the_head,
    trained_groups_exist,
    warmup_and_decay_fit,
    kept_checkpoints_are_written,
    local_checkpoints_have_a_place,
    rollback_follows_skips,
    hangs_are_named_in_time,
    load_can_be_used,
    changed_fields_may_change,
    profiled_steps_are_a_pair,
    run_is_a_folder,
)
