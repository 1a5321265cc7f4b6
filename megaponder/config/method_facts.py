"""What the rules and the planner know about a pondering method: plain numbers, so neither needs PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    @property
    def layers(self) -> tuple[int, int] | None: ...
    @property
    def grad(self) -> bool: ...


class MethodLike(Protocol):
    """The part of `megaponder.ponder.base.Method` that is plain Python."""

    name: ClassVar[str]
    options: Any
    rider_channels: int
    mixes_vocabulary: bool
    keeps_kv: bool
    skips: bool
    weighs: bool
    core: tuple[int, int] | None
    reads_every_pass: bool
    trains_exits: bool

    def passes(self, seed: int, step: int | None) -> Sequence[PassLike]: ...
    def longest(self, seed: int) -> Sequence[PassLike]: ...
    def extra_flops(self, p: Any, vocab_size: int) -> float: ...
    def feedback_flops(self, p: Any, vocab_size: int) -> float: ...
    def training_flops(self, p: Any, vocab_size: int) -> float: ...


@dataclass(frozen=True)
class MethodFacts:
    """What a method requires of the layout."""

    max_passes: int = 1
    max_slots: int = 1
    rider_channels: int = 0
    mixes_vocabulary: bool = False
    keeps_kv: bool = False
    reads_every_pass: bool = False
    """The head reads every pass and keeps its logits."""
    trains_exits: bool = False
    """The losses of the passes also train who stops when."""
    skips: bool = False
    """Tokens halt, and a halted one needs no computation."""
    weighs: bool = False
    """Keys have weights, from the second pass on."""
    core: tuple[int, int] | None = None
    """The first layer that is repeated and the one after the last, where only the middle of the stack is."""
    free_passes: bool = False
    """Some passes run without gradient."""
    frozen: bool = False
    """All passes do: only the method's own parameters are trained."""
    has_parameters: bool = False
    """The method has parameters of its own beside the backbone's."""
    token_rows: Mapping[str, int] = field(default_factory=dict)
    """Options that name a row of the embedding table, needed by the method in addition to the text's tokens."""
    token_counts: Mapping[str, int] = field(default_factory=dict)
    """Options that count tokens of the vocabulary; 0: all."""

    @property
    def steps(self) -> int:
        """The most steps of a token (`Pass.steps`): slots, or passes where it has one row in each."""
        return self.max_slots if self.max_slots > 1 else self.max_passes


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
