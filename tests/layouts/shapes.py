"""What a case and a layout of the matrix say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    family: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    skip: bool = False
    """Leave halted tokens out of the computation."""
    steps: int = 1
    """Training steps that are run; the last one's numbers are compared."""
    stages: dict[int, list[int]] = field(default_factory=dict)
    """Layers of each stage, by the number of stages; else equal parts."""
    eslm: dict[str, Any] = field(default_factory=dict)
    """Which tokens are trained on; of a micro-batch, in layouts that have the reference's alone."""
    disciplines: float = 0.0
    """Weight of the routers' loss on the sequences' disciplines, of which there are two."""


@dataclass(frozen=True)
class Layout:
    """A layout of the matrix; `batch` is the micro-batch size."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    experts: int = 1
    expert_tensor: int | None = None
    batch: int = 2
    sequence: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    recompute: str = "none"
    parts: int | None = None
    """Layers of a stage, and passes, that are recomputed; None: all."""
    offload: bool = False
    """What the first pass keeps lies in main memory."""
    deep: bool = False
    """Cases with more than two layers run here too."""
    every: bool = True
    """All cases run here (on two ranks without `SIMILAR`), or only `sample`."""
    without: tuple[str, ...] = ()
    """But not these."""
    sample: tuple[str, ...] | None = None
    """None: `REPRESENTATIVES`."""
    methods: bool = False
    """One case of each method, with and without its halted tokens left out, runs here as well."""
    evaluate: bool = False
    """The loss of evaluation is compared, too."""
    documents: bool = False
    """A sequence holds several documents, and a token sees its own."""

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data
