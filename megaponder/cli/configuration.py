"""From a command's CONFIG and overrides to a resolved configuration and, for a plan, everything derived from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaponder.config.gpus import GPUS, Gpu
from megaponder.config.load import load_config
from megaponder.config.method_facts import MethodFacts
from megaponder.config.resolve import resolve
from megaponder.config.rules import Machine, check
from megaponder.config.schema import DataConfig, RunConfig
from megaponder.errors import ConfigError, UserError


def read(path: str | None, overrides: list[str]) -> RunConfig:
    """What the file and the command line say."""
    if path is None:
        raise UserError("CONFIG is missing: name a YAML file, for example configs/demo.yaml.")
    return load_config(path, overrides)


def load(path: str | None, overrides: list[str]) -> RunConfig:
    """The resolved configuration; ConfigError for mistakes that do not depend on the layout."""
    return resolve(read(path, overrides))


def planned(
    path: str | None, overrides: list[str], world_size: int | None, gpu: Gpu
) -> tuple[RunConfig, Any, MethodFacts, int]:
    """Configuration, method, facts and world size of a plan; the world is one replica unless given.

    The vocabulary comes from the preset, the configuration or the datasets' descriptions.  Datasets missing on this
    machine are assumed to be valid if nothing else is needed from them; so are libraries, but not GPU capabilities.
    """
    cfg = load(path, overrides)
    if cfg.data.train and (cfg.model.vocab_size is None or _is_here(cfg.data)):
        from megaponder.data.check import check_data, fill_from_data

        cfg = fill_from_data(cfg, check_data(cfg))
    if cfg.model.vocab_size is None:
        rule = "a plan needs it, and neither a preset nor a dataset sets it"
        raise ConfigError("model.vocab_size", None, rule, "add --model.vocab_size 50304")
    from megaponder.ponder.facts import facts_of  # after the file's own mistakes
    from megaponder.ponder.settings import method_of, use_plugin, with_routers, with_stated_options

    use_plugin(cfg.ponder)
    cfg = with_stated_options(cfg)
    method = method_of(cfg)
    method.check_run()
    cfg = with_routers(cfg, method)
    facts = facts_of(method, cfg.train.seed)
    world_size = cfg.parallel.replica if world_size is None else world_size
    name = next(name for name, known in GPUS.items() if known is gpu)
    there = Machine("cuda", gpu.capability, transformer_engine=True, grad_accum_kernel=True, gpu=name)
    check(cfg, facts, world_size, there)
    return cfg, method, facts, world_size


def _is_here(data: DataConfig) -> bool:
    """Whether a plan can read the datasets: a laptop often plans for a cluster's."""
    from megaponder.data.check import all_sources

    sources = all_sources(data)
    return all(Path(f"{source.path}.idx").is_file() for source in sources)


def of_data(cfg: RunConfig) -> list[str]:
    """What a plan says about datasets that are here: how often each is read."""
    if not cfg.data.train or not _is_here(cfg.data):
        return []
    from megaponder.data import epochs
    from megaponder.data.check import check_data, open_data

    opened = open_data(cfg.data)
    return epochs.summary(cfg, check_data(cfg, opened).train, opened)
