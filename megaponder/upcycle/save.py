"""Whole tensors as a weights-only checkpoint that loads in any layout, without a model in memory beside them."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megaponder.checkpoint.state import TrainState
from megaponder.config.schema import RunConfig
from megaponder.errors import UserError
from megaponder.export.reference import one_process
from megaponder.export.save import save_tensors
from megaponder.upcycle.record import Record


def refuse_existing(out: Path) -> None:
    """UserError for a run folder that is there already, or one whose configuration would be replaced."""
    if any((out / name).exists() for name in ("checkpoints", "config.yaml")) or (out.exists() and not out.is_dir()):
        raise UserError(f"--out = {out}: it exists already; choose another folder.")


def save(out: Path, cfg: RunConfig, tensors: dict[str, Tensor], record: Record | None) -> Path:
    """The checkpoint of step 0 of the run folder `out`; tensors have stored names (`checkpoint.weights.Stored`)."""
    from megaponder.checkpoint.model_state import of_whole
    from megaponder.engine import groups
    from megaponder.engine.megatron_versions import save_strategy

    started = not dist.is_initialized()
    groups.init(one_process(cfg))
    try:
        state = TrainState(upcycled=record.plain() if record else {})
        return save_tensors(out / "checkpoints", cfg, of_whole(tensors), save_strategy(writers=2), state)
    finally:
        if started:
            groups.shutdown()
