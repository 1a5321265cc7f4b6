"""Small resolved configurations for the rules' tests, and changes that break a rule."""

from __future__ import annotations

import copy
from typing import Any

from megaponder.config.load import from_mapping
from megaponder.config.method_facts import MethodFacts
from megaponder.config.resolve import resolve
from megaponder.config.rules import Machine
from megaponder.config.schema import RunConfig

BASE: dict[str, Any] = {"model": {"preset": "llama-125m"}, "train": {"steps": 10}}
PASSES4 = MethodFacts(max_passes=4)


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


Broken = tuple[str, str, int, MethodFacts, "Machine | None", dict[str, Any]]


def broken(
    field: str, words: str, world: int = 1, facts: MethodFacts = PASSES4, machine: Machine | None = None, **changes: Any
) -> Broken:
    """Changes that break a rule, the field that the error names and words of its sentence."""
    return field, words, world, facts, machine, changes
