"""Validation curves: read from metrics.jsonl, plotted by tokens and by compute, and summarised in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megaponder.errors import UserError
from megaponder.monitor import jsonl


@dataclass(frozen=True)
class Curve:
    """Validation loss of one run."""

    name: str
    flops_per_token: float
    """Needed for training."""
    tokens: tuple[int, ...]
    losses: tuple[float, ...]
    """Nats per token."""

    @property
    def petaflops(self) -> list[float]:
        """Training compute at each point, in 10^15 FLOPs."""
        return [self.flops_per_token * t / 1e15 for t in self.tokens]


def read_curve(name: str, run: Path, flops_per_token: float) -> Curve:
    """The validation losses that a run has written; UserError if there are none."""
    rows = [row for row in jsonl.read(run / jsonl.NAME) if "validation_loss" in row]
    if not rows:
        raise UserError(f"{run / jsonl.NAME} has no validation_loss: set train.eval_batches above 0 and train again.")
    return Curve(name, flops_per_token, tuple(r["tokens"] for r in rows), tuple(r["validation_loss"] for r in rows))


def plot(curves: list[Curve], path: Path) -> None:
    """Writes a PNG: the same losses over training tokens and over training compute."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    by_tokens, by_compute = figure.subplots(1, 2, sharey=True)
    for curve in curves:
        by_tokens.plot([t / 1e3 for t in curve.tokens], curve.losses, marker="o", markersize=3, label=curve.name)
        by_compute.plot([1e3 * x for x in curve.petaflops], curve.losses, marker="o", markersize=3, label=curve.name)
    by_tokens.set(xlabel="training tokens (thousands)", ylabel="validation loss (nats per token)", title="Equal data")
    by_compute.set(xlabel="training compute (TFLOP)", title="Equal compute")
    for axes in (by_tokens, by_compute):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def verdict(pondering: Curve, matched: Curve, published: Curve) -> str:
    """What the plot shows, in words that are true whichever curve is lower; `matched` is the control that counts."""
    difference = matched.losses[-1] - pondering.losses[-1]
    ratio = pondering.flops_per_token / matched.flops_per_token
    result = (
        f"After {pondering.tokens[-1]:,} tokens the validation loss is {pondering.losses[-1]:.3f} for {pondering.name}"
        f", {matched.losses[-1]:.3f} for {matched.name}, which has the same embedding scale and initialisation, and "
        f"{published.losses[-1]:.3f} for {published.name} as published"
    )
    if abs(difference) < 0.01:
        comparison = "no notable difference"
    else:
        how = "lower" if difference > 0 else "HIGHER"
        comparison = f"{pondering.name} is {how} than {matched.name} by {abs(difference):.3f}"
    return (
        f"{result}: at equal data and size {comparison}, for {ratio:.1f} times the compute per token.  "
        "One seed and a few minutes of training: an example of the workflow, not evidence about the method."
    )
