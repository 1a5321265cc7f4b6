"""Full weights of a checkpoint in one process, for converters, exporters and decoders."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megaponder.checkpoint import reader
from megaponder.checkpoint.choose import locate
from megaponder.checkpoint.state import CONFIG, load_saved_config
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError, UserError
from megaponder.ponder.settings import check_shape


def read_config(folder: Path) -> RunConfig:
    """The configuration of the run that saved; UserError if it is not valid."""
    try:
        cfg = load_saved_config(folder)
        check_shape(cfg)
    except ConfigError as error:
        raise UserError(f"Checkpoint {folder} has an invalid configuration: {error}") from None
    return cfg


def load_weights(path: str | Path) -> tuple[RunConfig, dict[str, Tensor]]:
    """Config and full state dict (CPU, stored dtype) of a checkpoint saved in any layout; needs no launcher.

    `path` is a checkpoint, or a run folder, whose newest complete checkpoint is then taken.  Raises UserError when
    there is none or when it is damaged.
    """
    return read_weights(locate(path))


def read_weights(folder: Path) -> tuple[RunConfig, dict[str, Tensor]]:
    """The same of a checkpoint that `locate` has found."""
    cfg, parameters = read_config(folder), reader.parameters(folder)
    if (layers := cfg.model.num_layers or 0) > len(parameters):
        raise UserError(
            f"Checkpoint {folder}: {CONFIG} has {layers:,} layers, but there are {len(parameters)} tensors."
        )
    weights = reader.read(folder, parameters)
    return cfg, {reader.module_name(name): tensor for name, tensor in weights.items()}
