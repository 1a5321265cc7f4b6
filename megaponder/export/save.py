"""Weights-only checkpoints, as written by an import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaponder import files
from megaponder.checkpoint import folder, writers
from megaponder.checkpoint.state import CONFIG, Contents, TrainState, save_state
from megaponder.config.load import dump
from megaponder.config.schema import RunConfig
from megaponder.engine import cuda_on_cpu
from megaponder.errors import UserError

cuda_on_cpu.install()  # megatron-core's first import takes twice as long otherwise

from megaponder.checkpoint.model_state import layout, sharded_state  # noqa: E402
from megaponder.engine.model import PonderStage  # noqa: E402


def refuse_taken(root: Path, force: bool) -> None:
    """UserError if `root` has checkpoints already, unless `force`."""
    target = folder.final(root, 0)
    for link in (root.parent, root, target):
        files.refuse_lost_link(link)
    if target.exists() and not force:
        raise UserError(f"{target} already exists; choose another folder, or say --force to replace it.")
    if (others := [p for step, p in folder.published(root).items() if step]) and not force:
        raise UserError(f"{others[0]} belongs to a run, which would not start from the import; choose another folder.")


def save_weights(
    root: Path, cfg: RunConfig, stage: PonderStage, force: bool = False, state: TrainState | None = None
) -> Path:
    """Write a one-process stage as the checkpoint of step 0 under `root` and publish it; it loads in any layout.

    UserError if it already exists, unless `force`, or if it cannot be written.
    """
    return save_tensors(root, cfg, sharded_state(stage), writers.strategy(stage), state, force)


def save_tensors(
    root: Path,
    cfg: RunConfig,
    tensors: dict[str, Any],
    strategy: Any,
    state: TrainState | None = None,
    force: bool = False,
) -> Path:
    """The same of sharded tensors of one process; `strategy`: `writers.strategy`."""
    refuse_taken(root, force)
    target = folder.final(root, 0)
    path = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder.sweep(root)
        path = folder.create(root, 0)
        with writers.one_sentence(path, lambda why: UserError(f"{target} cannot be written: {why}.")):
            request, _ = writers.request({"model": tensors}, path, strategy)
            request.execute_sync()
            dump(cfg, path / CONFIG)
            save_state(path, state or TrainState(), Contents(masters=False, layout=layout(), optimizer=False))
            return folder.publish(path, root, 0)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}.") from error
    finally:
        if path is not None:
            folder.discard(path)
