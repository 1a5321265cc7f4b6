"""One row of metrics and the names that every tracker uses."""

from __future__ import annotations

from dataclasses import dataclass, field

TAGS = {
    "loss": "train/loss",
    "auxiliary_loss": "train/auxiliary_loss",
    "validation_loss": "valid/loss",
    "grad_norm": "optimizer/grad_norm",
    "learning_rate": "optimizer/learning_rate",
    "global_batch": "train/global_batch",
    "step_seconds": "throughput/step_seconds",
    "tokens_per_second": "throughput/tokens_per_second",
    "tokens_per_second_per_device": "throughput/tokens_per_second_per_device",
    "tflops_per_device": "throughput/tflops_per_device",
    "mfu": "throughput/mfu",
    "hfu": "throughput/hfu",
    "evaluation_seconds": "throughput/evaluation_seconds",
    "checkpoint_seconds": "throughput/checkpoint_seconds",
}
"""Grouped names for TensorBoard and Weights & Biases; statistics of the method go to ponder/<name>."""


@dataclass
class Row:
    """What is known after a step.  Loss, gradient norm and learning rate are those of the step itself; times and rates
    are means since the previous row.  A value that is not known is absent, never a stand-in."""

    step: int
    sequences: int
    tokens: int
    """Consumed by the run so far."""
    values: dict[str, float] = field(default_factory=dict)
    """Metrics by the names in `TAGS`."""
    stats: dict[str, float] = field(default_factory=dict)
    """The method's statistics."""

    def flat(self) -> dict[str, float | int]:
        """All of it in one level, as written to metrics.jsonl."""
        position = {"step": self.step, "sequences": self.sequences, "tokens": self.tokens}
        return position | self.values | {f"ponder_{name}": value for name, value in self.stats.items()}

    def tagged(self) -> dict[str, float]:
        """Metrics by grouped names."""
        return {TAGS[n]: v for n, v in self.values.items()} | {f"ponder/{n}": v for n, v in self.stats.items()}
