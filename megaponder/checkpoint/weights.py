"""Full weights of a checkpoint in one process, for converters, exporters and decoders."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megaponder.checkpoint import reader
from megaponder.checkpoint.choose import locate
from megaponder.checkpoint.home import at_home
from megaponder.checkpoint.state import CONFIG, load_saved_config
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError, UserError
from megaponder.ponder.settings import check_shape


def read_config(folder: Path) -> RunConfig:
    """The configuration of the run that saved, with paths that are found from here (`at_home`); UserError if it is not
    valid."""
    try:
        cfg = at_home(load_saved_config(folder), folder)
        check_shape(cfg)
    except ConfigError as error:
        raise UserError(f"Checkpoint {folder} has an invalid configuration: {error}") from None
    return cfg


def load_weights(path: str | Path, ema: bool = False) -> tuple[RunConfig, dict[str, Tensor]]:
    """Config and full state dict (CPU, stored dtype) of a checkpoint saved in any layout; needs no launcher.

    `path` is a checkpoint, or a run folder, whose newest complete checkpoint is then taken.  `ema`: the moving average
    of the weights (FP32).  Raises UserError when there is none or when it is damaged.
    """
    return read_weights(locate(path), ema)


def read_weights(folder: Path, ema: bool = False) -> tuple[RunConfig, dict[str, Tensor]]:
    """The same of a checkpoint that `locate` has found."""
    cfg, parameters = read_config(folder), reader.parameters(folder)
    if (layers := cfg.model.num_layers or 0) > len(parameters):
        raise UserError(
            f"Checkpoint {folder}: {CONFIG} has {layers:,} layers, but there are {len(parameters)} tensors."
        )
    if ema and not reader.beside(folder, reader.EMA):
        why = "it has no moving average of the weights, since optimizer.ema_decay was 0"
        raise UserError(f"Checkpoint {folder}: {why}; leave --ema out, or average checkpoints (megaponder average).")
    return cfg, _weights(folder, reader.EMA if ema else "")


def precise_weights(folder: Path) -> dict[str, Tensor]:
    """The weights alone, as `load_weights` names them: from the FP32 masters where the checkpoint has them."""
    return _weights(folder, reader.MASTER)


class Stored:
    """Weights of a checkpoint under the names that it stores them by, read one part at a time; FP32 masters where it
    has them."""

    def __init__(self, folder: Path):
        self.folder, own = folder, reader.parameters(folder)
        masters = reader.beside(folder, reader.MASTER)
        self._places = {name: f"{reader.MASTER}{name}" for name in own if f"{reader.MASTER}{name}" in masters}
        self.tensors = own | {name: masters[place] for name, place in self._places.items()}
        """Shape and format by name."""

    def read(self, *names: str) -> list[Tensor]:
        """These tensors, whole."""
        places = [self._places.get(name, name) for name in names]
        found = reader.read(self.folder, {p: self.tensors[n] for p, n in zip(places, names, strict=True)})
        return [found[place] for place in places]


def _weights(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Every parameter by its name in a stage, from the tensor with this prefix where there is one."""
    chosen = reader.beside(folder, prefix) if prefix else {}
    chosen |= {n: m for n, m in reader.parameters(folder).items() if f"{prefix}{n}" not in chosen}
    found: dict[str, Tensor] = {}
    for name, tensor in reader.read(folder, chosen).items():
        name = reader.module_name(name.removeprefix(prefix))
        before, stacked, after = name.partition(reader.EXPERTS)
        if not stacked:
            found[name] = tensor
        else:  # one tensor for all experts of a layer
            found |= {f"{before}.mlp.experts.local_experts.{e}.{after}": part for e, part in enumerate(tensor)}
    return found
