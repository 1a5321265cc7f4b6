"""What the training tests run inside worker processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from megaponder.config.load import from_mapping
from megaponder.config.schema import RunConfig

MODEL = {
    "family": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 90,
    "vocab_multiple": 16, "tie_embeddings": True,
}  # fmt: skip


def config(run: str, data: str, **changes: Any) -> RunConfig:
    """A tiny run on the dataset at `data`; `changes` are dotted names with __ for the dot."""
    values: dict[str, Any] = {
        "run": run,
        "model": dict(MODEL),
        "ponder": {"method": "loop", "options": {}},
        "data": {"train": [data], "sequence_length": 16, "split": "80,20,0", "loss_mask": "ignore_eod_target"},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_fraction": 0.2},
        "train": {"steps": 8, "global_batch": 4, "micro_batch": 1, "eval_every": 4, "eval_batches": 1},
        "checkpoint": {"every": 3},
        "logging": {"every": 1, "tensorboard": False},
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        values[section] = values[section] | {field: value} if field else value
    return from_mapping(values)


def run_train(run: str, data: str, **changes: Any) -> None:
    """Train once."""
    from megaponder.training.loop import train

    train(config(run, data, **changes))


def run_many(jobs: list[dict[str, Any]]) -> None:
    """Train several runs one after another: one start of the workers for all of them."""
    for job in jobs:
        run_train(**job)


def run_and_signal(run: str, data: str, at_step: int, number: int, rank: int, **changes: Any) -> None:
    """Train, and let one rank get a signal in the middle of a step."""
    from megaponder.training import run as module

    original = module.optimizer_step

    def step_with_signal(engine: Any, optimizer: Any, batches: Any, step: int) -> Any:
        if step == at_step and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), number)
        return original(engine, optimizer, batches, step)

    module.optimizer_step = step_with_signal
    run_train(run, data, **changes)


def run_with_nan(run: str, data: str, at_step: int, **changes: Any) -> str:
    """Train with weights that turn into NaN before a step; returns the error's sentence."""
    import torch

    from megaponder.errors import UserError
    from megaponder.training import run as module

    original = module.optimizer_step

    def spoiled(engine: Any, optimizer: Any, batches: Any, step: int) -> Any:
        if step == at_step:
            with torch.no_grad():
                next(engine.stage.parameters()).fill_(float("nan"))
        return original(engine, optimizer, batches, step)

    module.optimizer_step = spoiled
    try:
        run_train(run, data, **changes)
    except UserError as error:
        return str(error)
    return ""


__all__ = ["Path", "run_and_signal", "run_many", "run_train", "run_with_nan", "signal"]
