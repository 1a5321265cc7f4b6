"""What the rules and the planner know about a pondering method: plain numbers, so neither needs PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Protocol


class PassLike(Protocol):
    """A pass of a step's plan (`megaponder.ponder.base.Pass`)."""

    @property
    def index(self) -> int: ...
    @property
    def last(self) -> bool: ...
    @property
    def slots(self) -> int: ...
    @property
    def feedback_slots(self) -> int: ...
    @property
    def reads(self) -> Sequence[int] | None: ...
    @property
    def key_sets(self) -> int: ...


class MethodLike(Protocol):
    """The part of `megaponder.ponder.base.Method` that is plain Python."""

    name: ClassVar[str]
    options: Any
    rider_channels: int
    mixes_vocabulary: bool
    keeps_kv: bool
    skips: bool

    def passes(self, seed: int, step: int | None) -> Sequence[PassLike]: ...
    def extra_flops(self, p: Any, vocab_size: int) -> float: ...


@dataclass(frozen=True)
class MethodFacts:
    """What a method requires of the layout."""

    max_passes: int = 1
    max_slots: int = 1
    rider_channels: int = 0
    mixes_vocabulary: bool = False
    keeps_kv: bool = False
    skips: bool = False
    """Tokens halt, and a halted one needs no computation."""
    varying_passes: bool = False
    """The number of passes differs between steps."""
    has_parameters: bool = False
    """The method has parameters of its own beside the backbone's."""
    token_rows: Mapping[str, int] = field(default_factory=dict)
    """Options that name a row of the embedding table, needed by the method in addition to the text's tokens."""
    token_counts: Mapping[str, int] = field(default_factory=dict)
    """Options that count tokens of the vocabulary; 0: all."""


PLANS_SEEN = 64
"""Steps whose plans are sampled: enough to see every pass count of a method that draws it from a few values."""


def facts_of(method: MethodLike, seed: int = 0) -> MethodFacts:
    """The facts of a built method; its plan is sampled over the first steps of a seed."""
    plans = [method.passes(seed, step) for step in range(PLANS_SEEN)]
    counts = {len(plan) for plan in plans}
    return MethodFacts(
        max_passes=max(counts),
        max_slots=max(p.slots for plan in plans for p in plan),
        rider_channels=method.rider_channels,
        mixes_vocabulary=method.mixes_vocabulary,
        keeps_kv=method.keeps_kv,
        skips=method.skips,
        varying_passes=len(counts) > 1,
        has_parameters=_has_parameters(method),
        token_rows=_declared(method.options, "parameter"),
        token_counts=_declared(method.options, "counts_tokens"),
    )


def _declared(options: Any, kind: str) -> dict[str, int]:
    """Options that their class declares as of this kind, with their values."""
    declared = fields(options) if is_dataclass(options) else ()
    return {f.name: getattr(options, f.name) for f in declared if kind in f.metadata}


BUILDERS = ("entry_modules", "layer_modules", "exit_modules")


def _has_parameters(method: MethodLike) -> bool:
    """Whether the method builds modules; checked without building them, since gates can be large."""
    from megaponder.ponder.base import Method  # imported here: this module must not require PyTorch

    return any(getattr(type(method), name, None) not in (None, getattr(Method, name)) for name in BUILDERS)


@dataclass(frozen=True)
class OwnParameters:
    """Numbers of a method's own parameters, by place."""

    entry: int = 0
    """First stage."""
    layers: tuple[int, ...] = ()
    """Of each layer of the model; none where no layer has any."""
    exit: int = 0
    """Last stage."""

    def on(self, layers: slice, first: bool, last: bool) -> int:
        """Those of a stage with these layers."""
        return self.entry * first + sum(self.layers[layers]) + self.exit * last
