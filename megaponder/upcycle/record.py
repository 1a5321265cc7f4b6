"""What an upcycled model was made of: a part of its checkpoints' state, and of those of all runs that start from it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pydantic
from torch import Tensor, uint8

from megaponder.checkpoint.state import load_state
from megaponder.errors import UserError
from megaponder.upcycle.slices import HOW

INITS = ("average", "sum", "damped")
"""How shared expert and routed ones add up at first (docs/upcycling.md)."""


@dataclass(frozen=True)
class Source:
    """A dense model that went in."""

    name: str
    """Of the discipline; base: of the shared expert."""
    path: str
    """The checkpoint, as a path of the machine that made the mixture."""
    sha256: str
    """Of its weights by name, whatever layout stored them."""


@dataclass(frozen=True)
class Record:
    """How a mixture was made."""

    base: Source
    disciplines: tuple[Source, ...]
    """Discipline d has experts d k ... (d + 1) k - 1, where k is `slices`."""
    slices: int
    slicing: str
    seed: int
    """Of random slices, and of the routers."""
    init: str
    beta: float
    """damped: factor on the second matrices of routed experts."""
    neurons: int
    """Width F of the dense MLPs."""

    @property
    def factors(self) -> tuple[float, float]:
        """On the second matrices of the shared expert and of the routed ones."""
        return {"average": (0.5, 0.5), "sum": (1.0, 1.0), "damped": (1.0, self.beta)}[self.init]

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"disciplines": [asdict(one) for one in self.disciplines]}

    def __str__(self) -> str:
        names = ", ".join(one.name for one in self.disciplines)
        how = f"damped by {self.beta:g}" if self.init == "damped" else self.init
        return f"upcycled from {self.base.path}: {names}, {self.slices} {self.slicing} slices each, {how}"


def fingerprint(digest: Any, name: str, tensor: Tensor) -> None:
    """Take a tensor into a sha256, in the order of the names."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.contiguous().view(-1).view(uint8).numpy().data)


def sha256() -> Any:
    """A new one."""
    return hashlib.sha256()


def of_checkpoint(path: Path) -> Record | None:
    """The record of a checkpoint; None if it was not upcycled.  UserError if it is damaged."""
    given = load_state(path)[0].upcycled
    if not given:
        return None
    try:
        found = pydantic.TypeAdapter(Record).validate_python(given)
        assert found.slicing in HOW and found.init in INITS and found.slices > 0 and found.neurons >= found.slices
        return found
    except (pydantic.ValidationError, AssertionError):
        raise UserError(
            f"Checkpoint {path}: its record of how it was upcycled is damaged or of another version."
        ) from None
