"""Leaving layers of an imported model out, as retrofits do (`megaponder import --layers`)."""

from __future__ import annotations

import copy
import re

from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError
from megaponder.export.names import Tensors

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def chosen(text: str, cfg: RunConfig) -> list[int]:
    """The numbers of the layers in `text`, such as 0-3,10-21; ConfigError if `cfg` has no such layers in this order."""
    last = (cfg.model.num_layers or 0) - 1
    if cfg.ponder.method != "vanilla":
        rule = f"layers can be left out of models without a method, and this one has {cfg.ponder.method}"
        raise ConfigError("--layers", text, rule, "leave it out")
    numbers: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None:
            raise ConfigError("--layers", text, "it must be numbers and ranges of layers", f"use 0-{last} for all")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    if not numbers or numbers != sorted(set(numbers)) or numbers[-1] > last:
        rule = f"it must name layers from 0 to {last}, in order and once each"
        raise ConfigError("--layers", text, rule, f"use 0-{last} for all")
    return numbers


def pick(cfg: RunConfig, state: Tensors, numbers: list[int]) -> tuple[RunConfig, Tensors]:
    """The model of these layers alone, from the tensors of a one-process stage."""
    cfg, place = copy.deepcopy(cfg), {old: new for new, old in enumerate(numbers)}
    cfg.model.num_layers = len(numbers)
    out: Tensors = {}
    for name, tensor in state.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            out[name] = tensor
        elif int(match[1]) in place:
            out[f"decoder.layers.{place[int(match[1])]}.{match[2]}"] = tensor
    return cfg, out
