"""From a configuration to the parts of a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megaponder.checkpoint.choose import named
from megaponder.checkpoint.state import load_saved_config
from megaponder.config import launcher
from megaponder.config.fields import FREE, all_fields, value_of
from megaponder.config.gpus import find_gpu
from megaponder.config.load import dump
from megaponder.config.resolve import resolve
from megaponder.config.rules import check
from megaponder.config.rules.case import Machine, this_machine
from megaponder.config.schema import PonderConfig, RunConfig
from megaponder.data.check import check_data, fill_from_data
from megaponder.errors import ConfigError, UserError
from megaponder.monitor.throughput import Costs
from megaponder.ponder.base import Method
from megaponder.ponder.facts import facts_of
from megaponder.training.versions import versions

if TYPE_CHECKING:
    import torch


def complete(cfg: RunConfig) -> RunConfig:
    """Resolved, filled from the datasets and checked; ConfigError or UserError for the first mistake."""
    from megaponder.ponder.settings import method_of, use_plugin, with_routers, with_stated_options

    cfg = resolve(cfg)
    use_plugin(cfg.ponder)
    cfg = with_stated_options(cfg, _options_before(cfg))
    cfg = fill_from_data(cfg, check_data(cfg))
    world, machine = launcher.place().world_size, this_machine()
    method = method_of(cfg)
    method.check_run()
    cfg = with_routers(cfg, method)
    check(cfg, facts_of(method, cfg.train.seed), world, machine, needs_data=True)
    _refuse_what_cannot_fit(cfg, method, world, machine)
    refuse_unknown_tasks(cfg)
    return cfg


def _options_before(cfg: RunConfig) -> PonderConfig | None:
    """Method and options of the newest checkpoint of the run folder, or of the one that is loaded.

    What is wrong with either is said later, by all ranks together.
    """
    for place in (cfg.run, cfg.checkpoint.load):
        try:
            there = named(place).candidates if place is not None and Path(place).is_dir() else []
        except UserError:
            continue
        for path in there:
            with suppress(UserError):
                return load_saved_config(path).ponder
    return None


def refuse_unknown_tasks(cfg: RunConfig) -> None:
    """UserError for tasks that could not be run after the first steps."""
    if not cfg.train.tasks:
        return
    from megaponder.inference import tasks

    tasks.require(cfg.train.tasks, cfg.train.tasks_folder, "train.tasks")
    if cfg.data.tokenizer is None:
        rule = "train.tasks are text, and the model's tokenizer is not known"
        raise ConfigError("data.tokenizer", None, rule, "set it to the tokenizer of the datasets")


def _refuse_what_cannot_fit(cfg: RunConfig, method: Method, world_size: int, machine: Machine) -> None:
    """UserError for a model whose weights, gradients and optimizer state alone exceed the machine's memory."""
    import torch

    from megaponder.plan.memory import GIB, Job, rank_memory

    facts, passes = facts_of(method, cfg.train.seed), method.passes(cfg.train.seed, 0)
    job = Job(cfg, facts, passes, world_size)
    parts = [rank_memory(job, stage) for stage in range(cfg.parallel.pipeline)]
    need = max(p.weights + p.gradients + p.optimizer for p in parts)
    if machine.device == "cuda":
        room, where = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory, "a GPU here"
    else:
        room, where = psutil.virtual_memory().total, "this machine"
    if need > room:
        raise UserError(
            f"The model does not fit: its weights, gradients and optimizer state take {need / GIB:,.1f} GiB of the "
            f"{room / GIB:,.1f} GiB of {where}; use a smaller one, or spread it over more processes with "
            "parallel.tensor, parallel.pipeline, parallel.distributed_optimizer or train.engine: deepspeed (see "
            "megaponder plan)."
        )


def refuse_different_ranks(cfg: RunConfig) -> None:
    """ConfigError, on all ranks, if one of them was started with a different configuration.  A collective."""
    import torch.distributed as dist

    found: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, {name: value_of(cfg, name) for name in all_fields()})
    for rank, other in enumerate(found):
        for name, value in other.items():
            if value != found[0][name]:
                rule = f"rank {rank} has this value, but rank 0 has {found[0][name]!r}"
                raise ConfigError(name, value, rule, "start all ranks with the same configuration")


def refuse_different_versions() -> None:
    """UserError, on all ranks, if one of them runs other code: each would compute something else.  A collective.

    The first process of each node looks at what all of them run.
    """
    from megaponder.ranks import gather

    first, *others = gather(versions() if launcher.place().local_rank == 0 else None)
    for other in others:
        for name, value in (other.value or {}).items():
            if first.value is not None and value != first.value[name]:
                here = f"{first.value[name]} for {first.who}"
                raise UserError(f"{name} = {value} for {other.who}, but {here}: give all nodes the same version.")


def patience(cfg: RunConfig) -> tuple[float, float]:
    """Seconds without progress after which a stalled rank is named, and after which a dead one is given up.

    The second ends just before the process groups' time-out, whose own messages name no rank; where ranks restart
    within their processes, later, since over gloo it is by that time-out that they learn of an error.
    """
    assert cfg.faults.hang_minutes is not None
    share = 1.5 if cfg.faults.in_process_restarts else 0.9
    return 60 * cfg.faults.hang_minutes, share * 60 * cfg.parallel.timeout_minutes


def refuse_other_model(cfg: RunConfig, checkpoint: Path, weights_only: bool = False) -> list[str]:
    """ConfigError if the checkpoint belongs to a different model; returns warnings.

    Each field, and each option of the method, declares what may change when a run goes on, and when only weights are
    loaded.
    """
    from megaponder.ponder.registry import methods, options_that_differ

    known = cfg.ponder.method in methods()  # else a plugin's, which a saved configuration alone does not run
    saved, warnings = load_saved_config(checkpoint), []
    values = {n: (value_of(saved, n), value_of(cfg, n), field.declared) for n, field in all_fields().items()}
    if (sentences := _experts_changes(saved, cfg, checkpoint, weights_only)) is not None:
        del values["model.moe"]
        warnings += sentences
    if known:
        values |= {f"{FREE}.{n}": found for n, found in options_that_differ(saved.ponder, cfg.ponder).items()}
    for name, (then, now, declared) in values.items():
        change = declared.change_at_load if weights_only else declared.resume
        if now == then:
            continue
        if name == "train.steps" and (cfg.train.tokens or cfg.train.epochs) is not None:  # they follow from these
            continue
        if change == "asked" and name in cfg.checkpoint.load_changes:
            change = "warned"
        if change in ("refused", "asked"):
            rule = f"checkpoint {checkpoint} was trained with {then!r}"
            other = "" if weights_only else ", or a new run folder"
            other = f", or name {name} in checkpoint.load_changes" if change == "asked" else other
            raise ConfigError(name, now, rule, f"use that{other}")
        if change == "warned":
            warnings.append(_warning(name, then, now))
    if known and not weights_only:
        _refuse_other_tensors(saved, cfg, checkpoint)
    return warnings + (_scale_changes(saved, cfg) if known else [])


def _experts_changes(saved: RunConfig, cfg: RunConfig, checkpoint: Path, weights_only: bool) -> list[str] | None:
    """What to tell of two mixtures where the one goes on as the other; None where they are refused, or there is none.

    ConfigError where weights are loaded and more routers than there are would be needed.
    """
    from megaponder.checkpoint import routers
    from megaponder.decoding.moe_options import read

    if not (saved.model.moe and cfg.model.moe):
        return None
    then, now = read(saved.model.moe), read(cfg.model.moe)
    assert then is not None and now is not None
    same = routers.balanced_as(then, now)
    if weights_only:
        sentence = routers.describe_growth(same, now, checkpoint)
        return None if sentence is None else list(filter(None, [sentence]))
    if same != now:
        return None
    changes = ((name, getattr(then, name), getattr(now, name)) for name in routers.BALANCING)
    return [_warning(f"model.moe.{name}", *values) for name, *values in changes if values[0] != values[1]]


def _warning(name: str, then: Any, now: Any) -> str:
    return f"Warning: {name} was {then!r} up to this checkpoint and is {now!r} from here on."


def _refuse_other_tensors(saved: RunConfig, cfg: RunConfig, checkpoint: Path) -> None:
    """ConfigError if the method has other tensors of its own with the options of `cfg` than with those that saved."""
    from megaponder.ponder.facts import own_shapes
    from megaponder.ponder.settings import method_of

    then, now = (own_shapes(method_of(one)) for one in (saved, cfg))
    if then == now:
        return
    absent, left = sorted(now.keys() - then.keys()), sorted(then.keys() - now.keys())
    if absent:
        what = f"it has no tensor {absent[0]}"
    elif left:
        what = f"this model has no parameter for its tensor {left[0]}"
    else:
        name = min(name for name in then if then[name] != now[name])
        what = f"it has tensor {name} with shape {list(then[name])} where this model has {list(now[name])}"
    rule = f"checkpoint {checkpoint} was trained with {saved.ponder.options!r}, and {what}"
    raise ConfigError("ponder.options", cfg.ponder.options, rule, "use those, or a new run folder")


def _scale_changes(saved: RunConfig, cfg: RunConfig) -> list[str]:
    """A warning if the factor on embeddings changes: `auto` depends on the method, so comparing the field is not
    enough."""
    from megaponder.ponder.settings import embedding_scale, method_of

    then, now = (embedding_scale(c.model, method_of(c)) for c in (saved, cfg))
    if then == now:
        return []
    return [
        f"Warning: embeddings were multiplied by {then:.6g} up to this checkpoint, and by {now:.6g} from here on "
        "(model.embedding_scale)."
    ]


def refuse_other_disciplines(cfg: RunConfig, upcycled: dict[str, Any]) -> None:
    """ConfigError if `train.disciplines` names others than those that the experts were made of, or in another order."""
    data, made = cfg.train.disciplines.get("data"), [one["name"] for one in upcycled.get("disciplines", ())]
    if data is not None and made and list(data) != made:
        rule = f"the experts were made of {', '.join(made)}, in this order"
        raise ConfigError("train.disciplines.data", list(data), rule, "name all of them so (an empty list: no dataset)")


def costs(cfg: RunConfig, method: Method, devices: int) -> Costs:
    """FLOPs per token, and the device's peak if known."""
    import torch

    from megaponder.plan import flops

    peak = cfg.logging.peak_tflops
    if peak is None and torch.cuda.is_available():
        gpu = find_gpu(torch.cuda.get_device_name())
        peak = gpu.bf16_tflops if gpu else None
    each = flops.micro_batches(cfg, devices)
    needed, executed = flops.mean_needed(cfg, method), flops.mean_executed(cfg, method, each)
    return Costs(needed, executed, devices, peak, flops.step_flops(cfg, method) if method.skips else None)


def graphs_that_fit(cfg: RunConfig, method: Method, device: torch.device, world_size: int) -> RunConfig:
    """`precision.cuda_graphs: auto` becomes false if the plan says that captured passes do not fit on this GPU."""
    import torch

    if device.type != "cuda":
        return cfg
    from megaponder.plan.memory import Job, settle_graphs

    room = torch.cuda.get_device_properties(device).total_memory
    return settle_graphs(Job(cfg, facts_of(method, 1), method.longest(cfg.train.seed), world_size), room)


def write_config(cfg: RunConfig) -> None:
    """The complete configuration, in the run folder."""
    Path(cfg.run).mkdir(parents=True, exist_ok=True)
    dump(cfg, Path(cfg.run) / "config.yaml")
