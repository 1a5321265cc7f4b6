"""Which earlier layers a layer mixes values with in Depth-Attention; no tensors, so that rules and plans can ask.

Layers are counted in the order in which they run: with `passes: across` the list of earlier layers goes on from one
pass to the next, with `within` it starts anew in each pass.  With several `blocks` the stack is cut into as many equal
parts, and a layer sees its own part alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

T = TypeVar("T")
CHOICES: dict[str, tuple[str, ...]] = {
    "values": ("mixed", "raw"),
    "query": ("mean_query", "mean_prob"),
    "own": ("softmax", "residual"),
    "passes": ("across", "within"),
}
"""Words that the options of this name may have; the first is the default."""


@dataclass(frozen=True)
class DepthAttention:
    """The feature `depth_attention` with its defaults filled in."""

    sources: str | tuple[int, ...] = "all"
    """all, last:N, stride:N (every Nth layer, counted backwards), or numbers of layers, from 0."""
    values: str = CHOICES["values"][0]
    """What an earlier layer gives: its mixed values, or its own from before mixing."""
    query: str = CHOICES["query"][0]
    """How the query heads of a group agree on weights: by the mean of their queries, or of their probabilities."""
    own: str = CHOICES["own"][0]
    """A layer's own values compete in the softmax, or the mix of earlier ones is added to them (residual)."""
    scale: float = 0.0
    """On the scores; 0: 1 / sqrt(head size)."""
    passes: str = CHOICES["passes"][0]
    """Whether the layers of earlier passes count as earlier layers."""
    blocks: int = 1
    """Equal parts of the stack, none of which sees another."""

    @property
    def number(self) -> int:
        """The N of `last:N` and `stride:N`; 0 where there is none."""
        return int(self.sources.partition(":")[2] or 0) if isinstance(self.sources, str) else 0

    @property
    def last(self) -> int:
        """N of `last:N`, else 0: how many earlier layers suffice."""
        return self.number if str(self.sources).startswith("last:") else 0

    def of(self, earlier: Sequence[T]) -> list[T]:
        """Those of the earlier layers (as `after` keeps them) that a layer mixes with."""
        if str(self.sources).startswith("stride:"):
            return list(earlier[len(earlier) % self.number :: self.number])
        return list(earlier[-self.last :] if self.last else earlier)

    def after(self, earlier: Sequence[T], new: T, layer: int, layers: int) -> list[T]:
        """What later layers may mix with once layer `layer` of `layers` has run and made `new`."""
        if self.blocks > 1 and (layer + 1) % (layers // self.blocks) == 0:  # the last of its block
            return []
        if not isinstance(self.sources, str) and layer not in self.sources:
            return list(earlier)
        found = [*earlier, new]
        return found[-self.last :] if self.last else found


def read(given: dict[str, Any] | None) -> DepthAttention | None:
    """The feature's value; None where it is off ({}).  ValueError for names that it does not have."""
    if not given:
        return None
    if unknown := given.keys() - {f.name for f in fields(DepthAttention)}:
        raise ValueError(f"depth_attention has no {sorted(unknown)}")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return DepthAttention(**values)


def counted(depth: DepthAttention, layers: int, parts: Sequence[tuple[int, int] | None]) -> Iterator[list[int]]:
    """For each pass, whose layers `parts` gives (None: all): how many sources each layer has that it runs, in order."""
    earlier: list[int] = []
    for part in parts:
        if depth.passes == "within":
            earlier = []
        found = []
        for layer in range(*(part or (0, layers))):
            found.append(len(depth.of(earlier)))
            earlier = depth.after(earlier, layer, layer, layers)
        yield found


def crossing(depth: DepthAttention, layers: int, parts: Sequence[tuple[int, int] | None], ends: Sequence[int]) -> Any:
    """For each pass, what is left of earlier layers at each of the layers `ends`, where a pipeline stage ends."""
    earlier: list[int] = []
    for part in parts:
        found, (begin, end) = [], part or (0, layers)
        if depth.passes == "within":
            earlier = []
        for layer in range(layers):
            if begin <= layer < end:
                earlier = depth.after(earlier, layer, layer, layers)
            if layer + 1 in ends:
                found.append(len(earlier))
        yield found
