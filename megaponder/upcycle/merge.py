"""A mixture back to a dense model: its shared expert, or the slices of one discipline put together again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from megaponder.checkpoint import origin
from megaponder.checkpoint.choose import locate
from megaponder.checkpoint.weights import Stored, read_config
from megaponder.config.fields import nearest
from megaponder.config.load import dump
from megaponder.config.schema import ParallelConfig, PrecisionConfig
from megaponder.errors import ConfigError, UserError
from megaponder.export.import_config import start_config
from megaponder.ponder.settings import check_shape
from megaponder.upcycle import slices as cutting
from megaponder.upcycle.dense import FUSED_NORM, PLAIN_NORM
from megaponder.upcycle.record import Record, of_checkpoint
from megaponder.upcycle.save import refuse_existing, save

SHARED = "shared"


@dataclass(frozen=True)
class Merged:
    """What was written."""

    checkpoint: Path
    take: str
    record: Record

    def __str__(self) -> str:
        what = "the shared expert" if self.take == SHARED else f"the slices of {self.take}"
        return (
            f"{self.checkpoint}: a dense model, whose MLPs are {what} of a mixture that was {self.record}.\n"
            f"Train it: megaponder train {self.checkpoint.parents[1] / 'config.yaml'}"
        )


def merge(mixture: str | Path, out: str | Path, take: str = SHARED) -> Merged:
    """Write the run folder `out` with one weights-only checkpoint (step 0, FP32) of a dense model.

    `take`: shared, or a discipline.  The factors that `split` folded into second matrices are taken out again, so a
    mixture that was not trained since gives the base's bits, or the discipline's.
    UserError for a model that was not made by `split`, and for a discipline whose weights were damped to nothing.
    """
    out, path = Path(out), locate(mixture)
    record = of_checkpoint(path)
    cfg = read_config(path)
    if record is None:
        if not cfg.model.moe:
            raise UserError(
                f"{mixture}: it has no experts to merge; megaponder upcycle split makes some of dense models."
            )
        raise UserError(f"{mixture}: it was not upcycled, so nothing says which of its experts are one MLP.")
    names = [one.name for one in record.disciplines]
    if take not in (SHARED, *names):
        fix = f"use {nearest(take, (SHARED, *names)) or SHARED}"
        raise ConfigError("--take", take, f"it has {', '.join((SHARED, *names))}", fix)
    factor = record.factors[0 if take == SHARED else 1]
    if not factor:
        raise UserError(f"{mixture}: its experts were damped to 0, so {take} is lost; use --take {SHARED}.")
    refuse_existing(out)
    stored, k = Stored(path), record.slices
    found: dict[str, Tensor] = {}
    for name in stored.tensors:
        if ".mlp." not in name:
            fused = cfg.model.norm_placement != "post"
            (tensor,) = stored.read(name)
            found[name.replace(PLAIN_NORM, FUSED_NORM) if fused else name] = tensor.float()
    for layer in range(cfg.model.num_layers or 0):
        at = f"decoder.layers.{layer}.mlp"
        kind = "shared_experts" if take == SHARED else "experts.experts"
        fc1, fc2 = stored.read(f"{at}.{kind}.linear_fc1.weight", f"{at}.{kind}.linear_fc2.weight")
        if take != SHARED:
            first = names.index(take) * k
            parts = cutting.blocks(record.neurons, k, record.slicing, record.seed, layer)
            fc1, fc2 = cutting.join(fc1[first : first + k], fc2[first : first + k], parts)
        found[f"{at}.linear_fc1.weight"], found[f"{at}.linear_fc2.weight"] = fc1.float(), fc2.float() / factor
    model = replace(cfg.model, ffn_size=record.neurons, moe={})
    cfg = replace(
        cfg,
        run=str(out),
        model=model,
        parallel=ParallelConfig(timeout_minutes=cfg.parallel.timeout_minutes),
        precision=PrecisionConfig(),
        train=replace(cfg.train, only=[], disciplines={}),
    )
    check_shape(cfg)
    checkpoint = save(out, cfg, found, None)
    origin.record(out, "merge", path)
    dump(start_config(cfg, out), out / "config.yaml")
    return Merged(checkpoint, take, record)
