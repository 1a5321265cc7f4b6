"""The mean of checkpoints' weights, or a run's moving average, as a run of its own: every command reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from megaponder.checkpoint import origin
from megaponder.checkpoint.choose import named
from megaponder.checkpoint.damage import damage
from megaponder.checkpoint.state import TrainState, load_state
from megaponder.checkpoint.weights import precise_weights, read_config, read_weights
from megaponder.config.load import dump
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError, UserError
from megaponder.export import reference
from megaponder.export.import_config import start_config
from megaponder.export.save import save_weights


@dataclass(frozen=True)
class Averaged:
    """What was written."""

    checkpoint: Path
    sources: tuple[Path, ...]
    ema: bool

    def __str__(self) -> str:
        if self.ema:
            what = f"the moving average of {self.sources[0]}"
        else:
            n = len(self.sources)
            what = f"the mean of {n} checkpoint{'s' * (n != 1)}, {', '.join(p.name for p in self.sources)}"
        return f"{self.checkpoint}: {what}, in FP32."


def average(run: str | Path, out: str | Path, last: int | None = None, ema: bool = False) -> Averaged:
    """Write the run folder `out` with one weights-only checkpoint (step 0).

    It is the mean of the `last` newest checkpoints of a run, or with `ema` the moving average in its newest one.

    Sums are FP64, the stored weights FP32; of BF16 runs the FP32 masters are averaged.
    UserError for too few checkpoints, a damaged one among them, one without an average, and for a folder that exists.
    """
    run, out = Path(run), Path(out)
    if (last is None) == (not ema):
        raise UserError("megaponder average: say either --last N or --ema.")
    sources = _newest(run, 1 if last is None else last)
    if ema:
        cfg, state = read_weights(sources[0], ema=True)
    else:
        cfg, state = read_config(sources[0]), mean(sources)
    if (out / "checkpoints").exists() or (out.exists() and not out.is_dir()):
        raise UserError(f"--out = {out}: it exists already; choose another folder.")
    made_from = TrainState(upcycled=load_state(sources[0])[0].upcycled)
    with reference.engine(cfg, state) as engine:
        cfg = _of(cfg, out)
        checkpoint = save_weights(out / "checkpoints", cfg, engine.stage, state=made_from)
    origin.record(out, "average", *sources)
    dump(start_config(cfg, out), out / "config.yaml")
    return Averaged(checkpoint, tuple(sources), ema)


def mean(sources: list[Path]) -> dict[str, Tensor]:
    """The mean of checkpoints' weights, one in memory at a time beside the sum."""
    total: dict[str, Tensor] = {}
    for path in sources:
        for name, tensor in precise_weights(path).items():
            total[name] = tensor.double() + total.get(name, 0.0)
    return {name: (tensor / len(sources)).float() for name, tensor in total.items()}


def _newest(run: Path, last: int) -> list[Path]:
    """The newest checkpoints of a run, newest first."""
    if last < 1:
        raise ConfigError("--last", last, "it must be at least 1", "the nearest is 1")
    there = named(run).candidates
    if last > len(there):
        fix = f"the nearest is {len(there)}" if there else "name a run that has saved one"
        raise ConfigError("--last", last, f"{run} has {len(there)} checkpoint{'s' * (len(there) != 1)}", fix)
    for path in there[:last]:
        if (reason := damage(path)) is not None:
            raise UserError(f"Checkpoint {path} cannot be used because {reason}.")
    return there[:last]


def _of(cfg: RunConfig, out: Path) -> RunConfig:
    """The configuration of the new run: in FP32, as its weights are."""
    precision = replace(cfg.precision, dtype="fp32", fp8="none")
    return replace(cfg, run=str(out), precision=precision)
