"""The file that `megaponder eval` writes and `megaponder compare` reads, and its part about depth.

path, step, length, method, options
results     by variant: loss, perplexity, bits per byte and FLOPs of each dataset (`data`) and of all (`together`)
sample      which part of the text the following is of
sweep       the same weights at other depths (`inference.sweep`)
analysis    what passes bring, and who gets them (`inference.benefit`)
tasks       numbers of lm-eval
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megaponder.checkpoint.choose import locate
from megaponder.checkpoint.state import load_state
from megaponder.config.schema import RunConfig
from megaponder.data.indexed import read_index
from megaponder.data.tokenizer import load_tokenizer
from megaponder.errors import UserError
from megaponder.export import reference
from megaponder.inference import benefit, variants
from megaponder.inference.heldout import Reading, Score, together
from megaponder.inference.sweep import sweep

NAME = "eval.json"
"""In a run folder."""


@dataclass(frozen=True)
class Sample:
    """A part of held-out text."""

    prefixes: tuple[str, ...]
    targets: int
    """Of each dataset."""
    skipped: int
    """Targets before them, on which thresholds are fitted."""

    def reading(self, batch: int, length: int | None = None) -> Reading:
        """Of the sample, in windows of `length` tokens."""
        return Reading(batch, length, self.targets, self.skipped)


def sample(named: Mapping[str, str], targets: int) -> Sample:
    """About `targets` targets, the same number of each dataset, behind an eighth as many."""
    each = max(1, targets // len(named))
    shortest = min(read_index(prefix).tokens for prefix in named.values())
    each = min(each, max(1, shortest * 8 // 9))
    return Sample(tuple(named.values()), each, max(1, min(each // 8, shortest - each)))


def by_depth(
    cfg: RunConfig, state: dict[str, Tensor], sample: Sample, batch: int, length: int | None = None
) -> dict[str, Any]:
    """Sweep and analysis of a whole model in this process, in FP32."""
    reading = sample.reading(batch, length)
    swept = sweep(cfg, state, sample.prefixes, reading)
    try:
        words = load_tokenizer(cfg.data.tokenizer) if cfg.data.tokenizer else None
    except UserError:
        words = None  # the run's tokenizer is elsewhere: classes by frequency alone
    if cfg.ponder.method == "ponderlm" and variants.has_threshold(cfg):
        cfg = variants.with_threshold(cfg, 1.0)  # the same numbers, and how sure the model is after each pass
    with reference.engine(cfg, state) as engine:
        found = benefit.analyse(engine, cfg, sample.prefixes, words, reading)
    return {"sample": asdict(sample), "sweep": swept, "analysis": found}


def results_of(
    source: str, cfg: RunConfig, found: Sequence[tuple[str, Mapping[str, Score]]], length: int
) -> dict[str, Any]:
    """All numbers of `heldout.score_all` by variant, in windows of `length` tokens."""
    results: list[dict[str, Any]] = [
        {
            "variant": label,
            "data": {name: score.values() for name, score in scores.items()},
            "together": together(list(scores.values())).values(),
        }
        for label, scores in found
    ]
    place = {"path": source, "step": _step(source), "length": length}
    return place | {"method": cfg.ponder.method, "options": cfg.ponder.options, "results": results}


def _step(source: str) -> int | None:
    """Training steps of a run's newest checkpoint or of a checkpoint; None for an export."""
    if (Path(source) / "config.json").is_file():
        return None
    return load_state(locate(source))[0].step
