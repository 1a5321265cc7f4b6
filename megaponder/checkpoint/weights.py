"""Whole weights of a checkpoint in one process, for converters, exporters and decoders."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megaponder.checkpoint import stored
from megaponder.checkpoint.choose import locate
from megaponder.checkpoint.state import CONFIG
from megaponder.config.load import load_config
from megaponder.config.schema import RunConfig


def load_weights(path: str | Path) -> tuple[RunConfig, dict[str, Tensor]]:
    """Config and full state dict (CPU, stored dtype) of a checkpoint saved at any layout; needs no launcher.

    `path` is a checkpoint, or a run folder, whose newest whole checkpoint is then taken.  Raises UserError when there
    is none or when it is damaged.
    """
    return read_weights(locate(path))


def read_weights(folder: Path) -> tuple[RunConfig, dict[str, Tensor]]:
    """The same of a checkpoint that `locate` has found."""
    weights = stored.read(folder, stored.parameters(folder))
    return load_config(folder / CONFIG, []), {stored.module_name(name): tensor for name, tensor in weights.items()}
