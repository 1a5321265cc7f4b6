"""What the rules and the planner are told about a method: `config.method_facts.MethodFacts`, taken from a built one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from megaponder.config.method_facts import MethodFacts, MethodLike
from megaponder.ponder.base import PARAMETER_PREFIX, Method

Modules = dict[str, nn.Module]


def facts_of(method: MethodLike, seed: int = 0) -> MethodFacts:
    """The facts of a built method."""
    longest = method.longest(seed)
    return MethodFacts(
        max_passes=len(longest),
        max_slots=max(p.slots for p in longest),
        rider_channels=method.rider_channels,
        mixes_vocabulary=method.mixes_vocabulary,
        keeps_kv=method.keeps_kv,
        reads_every_pass=method.reads_every_pass,
        trains_exits=method.trains_exits,
        skips=method.skips,
        weighs=method.weighs,
        core=method.core,
        free_passes=not all(p.grad for p in longest),
        frozen=not any(p.grad for p in longest),
        has_parameters=_has_parameters(method),
        token_rows=_declared(method.options, "parameter"),
        token_counts=_declared(method.options, "counts_tokens"),
    )


def _declared(options: Any, kind: str) -> dict[str, int]:
    """Options that their class declares as of this kind, with their values."""
    declared = fields(options) if is_dataclass(options) else ()
    return {f.name: getattr(options, f.name) for f in declared if kind in f.metadata}


def _has_parameters(method: MethodLike) -> bool:
    """Whether the method builds modules; without memory for them, since gates can be large."""
    if not isinstance(method, Method):
        return False
    return bool(
        on_paper(method.entry_modules) or on_paper(lambda: method.layer_modules(0)) or on_paper(method.exit_modules)
    )


def own_shapes(method: Method) -> dict[str, tuple[int, ...]]:
    """Shapes of the method's own tensors, under the names that they have in checkpoints."""
    parts: dict[str, Modules] = {
        "entry": on_paper(method.entry_modules),
        "layers": {
            str(i): nn.ModuleDict(on_paper(partial(method.layer_modules, i))) for i in range(method.shape.num_layers)
        },
        "modules": on_paper(method.exit_modules),
    }
    return {
        f"{PARAMETER_PREFIX}{part}.{name}": tuple(tensor.shape)
        for part, modules in parts.items()
        for name, tensor in nn.ModuleDict(modules).state_dict().items()
    }


def on_paper(build: Callable[[], Modules]) -> Modules:
    """The modules that a method builds, without memory for them; with it where a constructor reads a value."""
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError):
        return build()
