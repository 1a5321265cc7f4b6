"""Which layers each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Sequence

from megaponder.config.schema import RunConfig


def stage_sizes(cfg: RunConfig) -> list[int]:
    """Layers of each stage of a resolved configuration: `parallel.stage_layers`, or equal parts."""
    par = cfg.parallel
    assert cfg.model.num_layers
    return par.stage_layers or [cfg.model.num_layers // par.pipeline] * par.pipeline


def stage_range(cfg: RunConfig, stage: int) -> range:
    """Numbers of a stage's layers, from 0."""
    sizes = stage_sizes(cfg)
    return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


def run_in(layers: Sequence[int], part: tuple[int, int] | None) -> int:
    """How many of these layers a pass with `Pass.layers = part` runs."""
    return len(layers) if part is None else sum(part[0] <= i < part[1] for i in layers)
