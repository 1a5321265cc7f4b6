"""Dense models of several disciplines to one mixture: the base's MLP as shared expert, the others' cut into slices.

    y = a f(x) + s sum over the k chosen slices e of p_e b f_e(x),    s = k,  sum p_e = 1

    average    a = b = 1/2      the base, where the chosen ones are a full set of slices of MLPs that equal the base's
    sum        a = b = 1        twice the MLP: what shared expert and experts add up to if nothing is done
    damped     a = 1, b = beta  the base exactly with beta = 0

With equal p_e = 1/k the k slices of one discipline add up to b times its MLP, since s = k.  The factors are folded into
the second matrices.  Everything else is the base's, bit for bit; routers are fresh.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megaponder.backbone.init import draw, stream
from megaponder.checkpoint import origin
from megaponder.config.load import dump
from megaponder.config.schema import ParallelConfig, PrecisionConfig, RunConfig
from megaponder.errors import ConfigError, UserError
from megaponder.export.import_config import start_config
from megaponder.ponder.settings import check_shape, initialisation, method_of
from megaponder.upcycle import slices as cutting
from megaponder.upcycle.dense import (
    FUSED_NORM,
    MATRICES,
    PLAIN_NORM,
    Dense,
    matrices,
    refuse_other_shape,
    refuse_other_weights,
)
from megaponder.upcycle.record import INITS, Record
from megaponder.upcycle.save import refuse_existing, save

NOT_BUILT = {
    "delta": "experts that carry the difference of two MLPs need twice the width, as the difference is no single MLP",
    "clustered": "slices of neurons that are active together need activations, which are not measured",
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Upcycled:
    """What was written."""

    checkpoint: Path
    record: Record
    config: RunConfig

    def __str__(self) -> str:
        m, moe = self.config.model, self.config.model.moe or {}
        return (
            f"{self.checkpoint}: {moe['experts']} experts of width {m.ffn_size}, of which a row takes {moe['top_k']}, "
            f"beside a shared one of width {moe['shared_ffn']}; {self.record}.\n"
            f"Train its routers: megaponder train {self.checkpoint.parents[1] / 'config.yaml'} --train.only '[routers]'"
        )


def split(
    base: str | Path,
    experts: Mapping[str, str | Path],
    out: str | Path,
    *,
    slices: int = 8,
    init: str = "average",
    beta: float = 0.0,
    slicing: str = "contiguous",
    seed: int = 1234,
) -> Upcycled:
    """Write the run folder `out` with one weights-only checkpoint (step 0, FP32) of the mixture.

    `experts`: by discipline, copies of `base` whose MLPs alone were trained.  `slices`: k, of each of them, and the
    experts that a row takes.  One layer of a copy is in memory at a time, beside the mixture.
    UserError for models that are no such copies, naming the first tensor that differs and how far.
    """
    out = Path(out)
    _refuse(experts, slices, init, beta, slicing)
    dense = Dense("base", base)
    copies = [Dense(name, path) for name, path in experts.items()]
    for copy in copies:
        refuse_other_shape(dense, copy)
    refuse_existing(out)
    cfg = mixture_config(dense.config, len(copies), slices, out)
    neurons = dense.config.model.ffn_size or 0
    if slices > neurons:
        fix = f"use {cutting.proposed(neurons, slices)}"
        raise ConfigError("--slices", slices, f"the MLPs have {neurons} neurons", fix)
    check_shape(cfg)
    if (told := cutting.filling_warning(neurons, slices)) is not None:
        log.warning(told)

    def made(sources: list[Dense]) -> Record:
        first, *rest = (one.source() for one in sources)
        return Record(first, tuple(rest), slices, slicing, seed, init, beta, neurons)

    tensors = _assemble(cfg, dense, copies, made([dense, *copies]))
    record = made([dense, *copies])  # now with the hashes of what was read
    if (told := _equal(record)) is not None:
        log.warning(told)
    checkpoint = save(out, cfg, tensors, record)
    origin.record(out, "upcycle", dense.path, *(copy.path for copy in copies))
    dump(start_config(cfg, out), out / "config.yaml")
    return Upcycled(checkpoint, record, cfg)


def _refuse(experts: Mapping[str, str | Path], slices: int, init: str, beta: float, slicing: str) -> None:
    """UserError for options that mean nothing."""
    for field, value, known in (("--init", init, INITS), ("--slicing", slicing, cutting.HOW)):
        why = NOT_BUILT.get(value, f"there are {', '.join(known)}")
        if value not in known:
            raise ConfigError(field, value, why, f"use {known[0]}")
    if slices < 2:
        rule = "a router that takes one expert alone has no gradient"
        raise ConfigError("--slices", slices, rule, "the nearest is 2")
    if not (math.isfinite(beta) and beta >= 0):
        raise ConfigError("--beta", beta, "it must be a number of at least 0", "use 0")
    if beta and init != "damped":
        raise ConfigError("--beta", beta, f"--init {init} has no such factor", "leave it out, or use --init damped")
    if not experts:
        raise UserError("--experts: name at least one, as NAME=RUN.")
    for name in experts:
        if name in ("base", "shared") or not name.replace("-", "").replace("_", "").isalnum():
            rule = "a discipline's name has letters, digits, - and _, and is not base or shared"
            raise ConfigError("--experts", name, rule, "for example math")


def _equal(record: Record) -> str | None:
    """A sentence where two disciplines have the same weights."""
    first: dict[str, str] = {}
    for one in record.disciplines:
        if (other := first.setdefault(one.sha256, one.name)) != one.name:
            return f"--experts: {other} and {one.name} have the same weights, so their experts start equal."
    return None


def mixture_config(base: RunConfig, disciplines: int, slices: int, out: Path) -> RunConfig:
    """The configuration of the mixture, in one process."""
    neurons = base.model.ffn_size or 0
    moe = {
        "experts": disciplines * slices, "top_k": slices, "shared_ffn": neurons, "scale": float(slices),
    }  # fmt: skip
    model = replace(base.model, preset=None, ffn_size=cutting.width_of(neurons, slices), moe=moe)
    return replace(
        base,
        run=str(out),
        model=model,
        parallel=ParallelConfig(timeout_minutes=base.parallel.timeout_minutes),
        precision=PrecisionConfig(),
        optimizer=replace(base.optimizer, kind="adamw"),
        train=replace(base.train, engine="megatron", only=[], method_only_steps=0, method_lr=None),
    )


def _assemble(cfg: RunConfig, base: Dense, copies: list[Dense], record: Record) -> dict[str, Tensor]:
    """The mixture's tensors by their stored names; every source is compared, and told into its hash, in one order."""
    shared, routed = record.factors
    e, k, width = len(copies) * record.slices, record.slices, cfg.model.ffn_size or 0
    kind, std, _ = initialisation(cfg.model, method_of(cfg))
    found: dict[str, Tensor] = {}
    for name in sorted(base.stored.tensors):
        if name.endswith(MATRICES):
            continue
        (mine,) = base.stored.read(name)
        base.tell(name, mine)
        for copy in copies:
            (theirs,) = copy.stored.read(name)
            copy.tell(name, theirs)
            refuse_other_weights(copy, name, mine, theirs)
        found[name.replace(FUSED_NORM, PLAIN_NORM)] = mine.float()
    for layer in range(cfg.model.num_layers or 0):
        at = f"decoder.layers.{layer}.mlp"
        parts = cutting.blocks(record.neurons, k, record.slicing, record.seed, layer)
        fc1, fc2 = _read(base, layer)
        found[f"{at}.shared_experts.linear_fc1.weight"] = fc1
        found[f"{at}.shared_experts.linear_fc2.weight"] = fc2 * shared
        firsts, seconds = torch.empty(e, 2 * width, fc1.shape[1]), torch.empty(e, fc2.shape[0], width)
        for d, copy in enumerate(copies):
            fc1, fc2 = _read(copy, layer)
            for i, block in enumerate(parts):
                firsts[d * k + i], seconds[d * k + i] = cutting.cut(fc1, fc2 * routed, block, width)
        found[f"{at}.experts.experts.linear_fc1.weight"] = firsts
        found[f"{at}.experts.experts.linear_fc2.weight"] = seconds
        name = f"{at}.router.weight"
        found[name] = draw((e, fc1.shape[1]), kind, std, stream(record.seed, name))
    return found


def _read(one: Dense, layer: int) -> list[Tensor]:
    names = matrices(layer)
    found = one.stored.read(*names)
    for name, tensor in zip(names, found, strict=True):
        one.tell(name, tensor)
    return [tensor.float() for tensor in found]
