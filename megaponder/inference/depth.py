"""How deeply a checkpoint ponders each token of a text: numbers, a coloured view and a figure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.text import Text

from megaponder.errors import UserError

COLOURS = ("grey50", "green", "yellow", "dark_orange", "red", "magenta")
"""From the fewest passes to the most."""
SHOWN = 8
"""Most and least pondered tokens that are listed."""


@dataclass(frozen=True)
class TokenDepth:
    """One token of the text."""

    text: str
    depth: int
    """Passes (or steps) that it ran."""
    nll: float | None
    """Negative log-likelihood of the token after it, in nats; None for the last one."""


@dataclass(frozen=True)
class Depths:
    """A text and the method's deepest possible depth."""

    tokens: tuple[TokenDepth, ...]
    deepest: int

    @property
    def mean(self) -> float:
        """Mean depth."""
        return sum(t.depth for t in self.tokens) / len(self.tokens)


def read_depths(checkpoint: str | Path, text: str, tokenizer: str | None = None) -> Depths:
    """Depth and NLL of each token of `text` under a checkpoint (or a run's newest one), in FP32 in one process.

    Raises UserError for a method without halting, an empty text, or one longer than the model's longest sequence.
    """
    from megaponder.checkpoint.weights import load_weights
    from megaponder.data.batch import MicroBatch
    from megaponder.export import reference
    from megaponder.export.tokenizer import of_text
    from megaponder.ponder.settings import method_of

    cfg, state = load_weights(checkpoint)
    method = method_of(cfg)
    if not method.halts:
        raise UserError(
            f"{checkpoint}: method {method.name} runs all its passes for every token, so there is no depth to show."
        )
    words = of_text(cfg, checkpoint, tokenizer)
    ids = words.encode_batch([text])[0]
    longest = cfg.model.max_positions or cfg.data.sequence_length
    if not 0 < len(ids) <= longest:
        raise UserError(f"the text has {len(ids)} tokens; it must have 1 to {longest}.")
    row = torch.tensor([ids])
    batch = MicroBatch(row, row.roll(-1, dims=1), torch.ones(row.shape))
    with reference.engine(cfg, state) as engine, torch.no_grad():
        out = engine.readout(batch)
        assert out.depth is not None
        losses = engine.stage.token_losses(out.hidden, batch)[:, 0].tolist()
        depths = [int(d) for d in out.depth[:, 0].tolist()]
    nll = [*losses[:-1], None]
    return Depths(
        tuple(TokenDepth(words.decode([i]), d, x) for i, d, x in zip(ids, depths, nll, strict=True)),
        method.max_depth(),
    )


def view(depths: Depths) -> Text:
    """The text with each token coloured by its depth, under a legend."""
    styles = _styles(depths.deepest)
    out = Text(f"mean depth {depths.mean:.2f} of {depths.deepest}:  ")
    for depth, style in enumerate(styles, start=1):
        count = sum(t.depth == depth for t in depths.tokens)
        out.append(f" {depth} ({count / len(depths.tokens):.0%}) ", style=f"reverse {style}")
    out.append("\n\n")
    for token in depths.tokens:
        out.append(token.text, style=styles[token.depth - 1])
    return out


def extremes(depths: Depths) -> tuple[list[tuple[str, float, int]], list[tuple[str, float, int]]]:
    """(most, least) pondered tokens as (text, mean depth, occurrences)."""
    seen: dict[str, list[int]] = defaultdict(list)
    for token in depths.tokens:
        seen[token.text].append(token.depth)
    rows = [(text, sum(d) / len(d), len(d)) for text, d in seen.items()]
    most = sorted(rows, key=lambda r: (-r[1], -r[2], r[0]))
    least = sorted(rows, key=lambda r: (r[1], -r[2], r[0]))
    return most[:SHOWN], least[:SHOWN]


def plot(depths: Depths, path: Path) -> None:
    """Writes a figure: depth and NLL along the text, and NLL by depth."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    along, by_depth = figure.subplots(1, 2, width_ratios=(3, 1))
    positions = range(len(depths.tokens))
    along.bar(positions, [t.depth for t in depths.tokens], width=1.0, color="tab:blue", alpha=0.5, label="depth")
    along.set(xlabel="token", ylabel="passes", ylim=(0, depths.deepest + 0.5), title="Depth along the text")
    if len(depths.tokens) <= 60:
        along.set_xticks(list(positions), [repr(t.text)[1:-1] for t in depths.tokens], rotation=90, fontsize=7)
    nll = along.twinx()
    nll.plot(positions, [t.nll for t in depths.tokens], color="tab:red", linewidth=1)
    nll.set_ylabel("NLL of the next token (nats)", color="tab:red")
    levels = sorted({t.depth for t in depths.tokens})
    groups = [[t.nll for t in depths.tokens if t.depth == d and t.nll is not None] for d in levels]
    by_depth.boxplot([g or [float("nan")] for g in groups])
    by_depth.set_xticks(range(1, len(levels) + 1), [str(d) for d in levels])
    by_depth.set(xlabel="depth", ylabel="NLL (nats)", title="NLL by depth")
    figure.savefig(path, dpi=120)


def _styles(deepest: int) -> list[str]:
    if deepest == 1:
        return [COLOURS[0]]
    last = len(COLOURS) - 1
    return [COLOURS[round(d * last / (deepest - 1))] for d in range(deepest)]
