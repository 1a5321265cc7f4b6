"""From a command's CONFIG and overrides to a resolved, checked configuration."""

from __future__ import annotations

from megaponder.config.facts import facts_of
from megaponder.config.load import load_config
from megaponder.config.resolve import resolve
from megaponder.config.rules import Machine, check
from megaponder.config.schema import RunConfig
from megaponder.errors import UserError


def checked_config(
    path: str | None, overrides: list[str], world_size: int, machine: Machine | None = None, needs_data: bool = False
) -> RunConfig:
    """The resolved configuration; ConfigError for the first rule that it breaks at this world size."""
    if path is None:
        raise UserError("CONFIG is missing: name a YAML file, for example configs/demo.yaml")
    cfg = resolve(load_config(path, overrides))
    from megaponder.ponder.settings import method_of  # after the file's own mistakes: it imports torch

    check(cfg, facts_of(method_of(cfg), cfg.train.seed), world_size, machine, needs_data)
    return cfg
