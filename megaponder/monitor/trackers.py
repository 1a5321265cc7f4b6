"""TensorBoard and Weights & Biases: the same names in both, the step as the axis, resume-safe."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Protocol

from megaponder.config.load import to_mapping
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError
from megaponder.monitor.identity import run_id
from megaponder.monitor.row import Row


class Tracker(Protocol):
    """Something that takes rows."""

    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


def _quiet_writer(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's writer raises an error at the next write, which reports it in a sentence."""
    if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
        threading.__excepthook__(args)


class TensorBoard:
    """Events in <run>/tensorboard; after a resume, events beyond `step` are hidden, in a replay all of them."""

    def __init__(self, run: Path, step: int, replay: bool = False):
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _quiet_writer
        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step or replay else None)

    def write(self, row: Row) -> None:
        """Add a scalar for every metric, over steps."""
        for tag, value in row.tagged().items():
            self._writer.add_scalar(tag, value, row.step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """A Weights & Biases run whose id lives in the run folder, so that every restart continues it.

    Rows carry their own axes (train/step, train/tokens): a resumed run may repeat steps without being rejected.
    """

    def __init__(self, run: Path, cfg: RunConfig, other_id: str | None = None):
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "logging.wandb",
                cfg.logging.wandb,
                "the wandb package is not installed",
                "pip install wandb, or use off",
            ) from None
        self._run: Any = wandb.init(
            project=cfg.logging.wandb_project,
            name=run.name,
            id=other_id or run_id(run),
            resume="allow",
            mode="offline" if cfg.logging.wandb == "offline" else "online",
            dir=str(run),
            config=to_mapping(cfg),
        )
        self._run.define_metric("train/step")
        self._run.define_metric("*", step_metric="train/step")

    def write(self, row: Row) -> None:
        """Log a row."""
        self._run.log(row.tagged() | {"train/step": row.step})

    def close(self) -> None:
        """Finish this part of the run."""
        self._run.finish()
