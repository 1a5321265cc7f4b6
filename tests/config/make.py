"""Small resolved configurations for the rules' tests."""

from __future__ import annotations

import copy
from typing import Any

from megaponder.config.load import from_mapping
from megaponder.config.resolve import resolve
from megaponder.config.schema import RunConfig

BASE: dict[str, Any] = {"model": {"preset": "llama-125m"}, "train": {"steps": 10}}


def config(**changes: Any) -> RunConfig:
    """Llama-125m for ten steps with changes by dotted name, written with `__` for the dot: train__steps=3."""
    data = copy.deepcopy(BASE)
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            data.setdefault(section, {})[field] = value
        else:
            data[section] = value
    return resolve(from_mapping(data))
