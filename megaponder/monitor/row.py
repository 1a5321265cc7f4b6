"""One row of metrics; `registry` has their names in every place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megaponder.monitor import registry

POSITION = ("step", "sequences", "tokens")
STATS = "ponder_"
"""Before the statistics of the method in metrics.jsonl."""


@dataclass
class Row:
    """What is known after a step.  Loss, gradient norm and learning rate are those of the step itself; times and rates
    are means since the previous row.  An unknown value is absent, never a placeholder."""

    step: int
    sequences: int
    tokens: int
    """Consumed by the run so far."""
    values: dict[str, float] = field(default_factory=dict)
    """Metrics by the names in `registry.METRICS`."""
    stats: dict[str, float] = field(default_factory=dict)
    """The method's statistics."""

    def position(self) -> dict[str, int]:
        """Where in the run the row was taken."""
        return {"step": self.step, "sequences": self.sequences, "tokens": self.tokens}

    def flat(self) -> dict[str, float | int]:
        """All values in one level, as written to metrics.jsonl."""
        return self.position() | self.values | {f"{STATS}{name}": value for name, value in self.stats.items()}

    def tagged(self) -> dict[str, float]:
        """Metrics by grouped names, for the trackers."""
        named = {registry.tag(n): v for n, v in (self.values | self.position()).items()}
        named |= {registry.tag(n, ponder=True): v for n, v in self.stats.items()}
        named.pop("", None)
        return named


def from_flat(data: Mapping[str, float]) -> Row:
    """The row that `flat` has written."""
    values = {n: v for n, v in data.items() if n not in POSITION and not n.startswith(STATS)}
    stats = {n.removeprefix(STATS): v for n, v in data.items() if n.startswith(STATS)}
    return Row(int(data["step"]), int(data["sequences"]), int(data["tokens"]), values, stats)
