"""Options of `train.disciplines`: routers learn which experts a text's discipline has, from the dataset it comes from.

    loss = - log sum over e in the discipline's experts of softmax(z)_e,    z: the router's logits of a row

averaged over the tokens of labelled sequences of the global batch, over a layer's passes, and summed over layers.  It
is the cross entropy with a target that lies on the discipline's experts, as far as routers can tell these apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPTIONS = ("weight", "data")


@dataclass(frozen=True)
class Disciplines:
    """`train.disciplines` with its defaults filled in."""

    data: Mapping[str, list[str]]
    """Datasets of each discipline, in the order of their experts; others have no label."""
    weight: float = 0.01
    """Of the loss."""

    def numbers(self) -> dict[str, int]:
        """The number of the discipline of each dataset, without .bin or .idx."""
        return {_prefix(path): number for number, paths in enumerate(self.data.values()) for path in paths}

    def of(self, dataset: str) -> int:
        """The number of a dataset's discipline; -1: it has none."""
        return self.numbers().get(_prefix(dataset), -1)


def _prefix(path: str) -> str:
    return path[:-4] if path.endswith((".bin", ".idx")) else path


def read(given: dict[str, Any] | None) -> Disciplines | None:
    """The options; None: there are no labels."""
    return Disciplines(**given) if given else None
