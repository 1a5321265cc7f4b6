"""Replays a run's rows into the trackers: for a run trained without them, or a tracker that lost some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from megaponder.config.load import load_config
from megaponder.config.schema import RunConfig
from megaponder.errors import UserError
from megaponder.monitor import jsonl, registry
from megaponder.monitor.row import Row, from_flat
from megaponder.monitor.trackers import TensorBoard, Tracker, WandB


def replay(
    run: Path, tensorboard: bool, wandb: Literal["offline", "online"] | None, wandb_id: str | None = None
) -> Iterator[str]:
    """Write all rows; yields a sentence for each finished tracker."""
    series = jsonl.of_run(run)
    rows = [from_flat(r) for r in series.rows]
    unknown = {name: None for row in rows for name in row.values if registry.find(name) is None}  # in their order
    for row in rows:
        row.values = {name: value for name, value in row.values.items() if name not in unknown}
    yield from series.sentences()
    if unknown:
        names = ", ".join(name[:40] for name in list(unknown)[:5]) + (", ..." if len(unknown) > 5 else "")
        yield f"Values unknown to this version were ignored: {names}."
    if tensorboard:
        _write(TensorBoard(run, 0, replay=True), rows)
        yield f"{run / 'tensorboard'}: {_count(rows)}; earlier rows there are hidden."
    if wandb is not None:
        _write(WandB(run, _config(run, wandb), wandb_id), rows)
        yield f"Weights & Biases ({wandb}): {_count(rows)}."


def _write(tracker: Tracker, rows: list[Row]) -> None:
    for row in rows:
        tracker.write(row)
    tracker.close()


def _count(rows: list[Row]) -> str:
    return f"{len(rows)} rows up to step {rows[-1].step}"


def _config(run: Path, mode: Literal["offline", "online"]) -> RunConfig:
    path = run / "config.yaml"
    if not path.is_file():
        raise UserError(
            f"{path} is missing; it is needed because Weights & Biases gets the configuration with the rows."
        )
    cfg = load_config(path, [])
    return replace(cfg, logging=replace(cfg.logging, wandb=mode))
