"""From a configuration to the parts of a run."""

from __future__ import annotations

from pathlib import Path

from megaponder.config import launcher
from megaponder.config.facts import facts_of
from megaponder.config.gpus import find_gpu
from megaponder.config.load import dump, load_config
from megaponder.config.resolve import resolve
from megaponder.config.rules import check
from megaponder.config.rules.case import this_machine
from megaponder.config.schema import RunConfig
from megaponder.data.check import check_data, fill_from_data
from megaponder.errors import ConfigError
from megaponder.monitor.throughput import Costs
from megaponder.ponder.base import Method

IDENTITY = (
    "model.family", "model.num_layers", "model.hidden_size", "model.num_heads", "model.num_kv_heads", "model.ffn_size",
    "model.vocab_size", "model.vocab_multiple", "model.rotary_fraction", "model.rotary_base", "model.parallel_residual",
    "model.tie_embeddings", "ponder.method",
)  # fmt: skip
"""Fields that must be those of the checkpoint: with others its weights would mean something else."""
WATCHED = (
    "data.train", "data.split", "data.sequence_length", "data.shuffle_seed", "ponder.options", "model.norm_eps",
    "model.embedding_scale",
)  # fmt: skip
"""Fields that may change between two parts of a run, but hardly by accident."""


def complete(cfg: RunConfig) -> RunConfig:
    """Resolved, filled from the datasets and checked; ConfigError or UserError for the first mistake."""
    from megaponder.ponder.settings import method_of

    cfg = resolve(cfg)
    cfg = fill_from_data(cfg, check_data(cfg))
    world = launcher.place().world_size
    check(cfg, facts_of(method_of(cfg), cfg.train.seed), world, this_machine(), needs_data=True)
    return cfg


def patience(cfg: RunConfig) -> tuple[float, float]:
    """Seconds without progress after which a stalled rank is named, and after which a dead one is no longer awaited.

    The second ends just before the process groups' time-out, whose own messages name no rank.
    """
    limit = 60 * cfg.parallel.timeout_minutes
    assert cfg.faults.hang_minutes is not None
    return 60 * cfg.faults.hang_minutes, 0.9 * limit


def value_of(cfg: RunConfig, name: str) -> object:
    """Value of a dotted field."""
    value: object = cfg
    for part in name.split("."):
        value = getattr(value, part)
    return value


def refuse_other_model(cfg: RunConfig, checkpoint: Path) -> list[str]:
    """ConfigError if the checkpoint is of another model; returns warnings."""
    saved = load_config(checkpoint / "config.yaml", [])
    for name in IDENTITY:
        now, then = value_of(cfg, name), value_of(saved, name)
        if now != then:
            rule = f"checkpoint {checkpoint} was trained with {then!r}"
            raise ConfigError(name, now, rule, "use that, or a new run folder")
    return [
        f"Warning: {name} was {value_of(saved, name)!r} up to this checkpoint and is {value_of(cfg, name)!r} from here."
        for name in WATCHED
        if value_of(cfg, name) != value_of(saved, name)
    ]


def costs(cfg: RunConfig, method: Method, devices: int) -> Costs:
    """FLOPs per token, and the device's peak where it is known."""
    import torch

    from megaponder.plan import flops

    peak = cfg.logging.peak_tflops
    if peak is None and torch.cuda.is_available():
        gpu = find_gpu(torch.cuda.get_device_name())
        peak = gpu.bf16_tflops if gpu else None
    needed, executed = flops.mean_needed(cfg, method), flops.mean_executed(cfg, method)
    by_pass = tuple(p.total for p in flops.step_flops(cfg, method).passes) if method.skips else ()
    return Costs(needed, executed, devices, peak, by_pass)


def write_config(cfg: RunConfig) -> None:
    """The complete configuration, in the run folder."""
    Path(cfg.run).mkdir(parents=True, exist_ok=True)
    dump(cfg, Path(cfg.run) / "config.yaml")
