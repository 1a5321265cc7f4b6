"""Dense models that become experts: what each may be, and whether they are copies of one base."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaponder.checkpoint.choose import locate
from megaponder.checkpoint.weights import Stored, read_config
from megaponder.config.model import ModelConfig
from megaponder.config.schema import RunConfig
from megaponder.errors import UserError
from megaponder.ponder.settings import embedding_scale, method_of
from megaponder.upcycle import record

MATRICES = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
"""Of a layer: what discipline experts may have trained."""
FUSED_NORM, PLAIN_NORM = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
"""What the norm before an MLP is called in a dense model's checkpoint, and before experts."""


def matrices(layer: int) -> tuple[str, str]:
    """Stored names of a layer's MLP."""
    first, second = (f"decoder.layers.{layer}.{name}" for name in MATRICES)
    return first, second


class Dense:
    """A checkpoint without experts."""

    def __init__(self, name: str, path: str | Path):
        """UserError if there is none, or if its MLPs cannot be cut into experts."""
        if (Path(path) / "config.json").is_file():
            raise UserError(f"{path} is a Hugging Face folder; make a run of it first: megaponder import {path} RUN.")
        try:
            self.name, self.path = name, locate(path)
        except UserError as error:
            raise UserError(f"{name} = {path}: {error}") from None
        self.config: RunConfig = read_config(self.path)
        m = self.config.model
        if m.moe:
            raise UserError(f"{path}: model.moe = {m.moe!r}: it has experts already; name a dense model.")
        if m.activation != "swiglu":
            raise UserError(f"{path}: model.activation = {m.activation}: experts are SwiGLU MLPs; name such a model.")
        if m.mlp_bias:
            raise UserError(f"{path}: model.mlp_bias = true: experts have no biases; name a model without.")
        self.stored = Stored(self.path)
        self._digest = record.sha256()

    def source(self) -> record.Source:
        """What is recorded of it, once every tensor was read in order of the names (`tell`)."""
        return record.Source(self.name, str(self.path.resolve()), self._digest.hexdigest())

    def tell(self, name: str, tensor: Tensor) -> None:
        """Take a tensor into the hash."""
        record.fingerprint(self._digest, name, tensor)


def refuse_other_shape(base: Dense, copy: Dense) -> None:
    """UserError if the two configurations describe different functions of their weights."""
    skip = {"preset", "init", "init_std", "init_output_scale", "max_positions", "embedding_scale"}
    pairs: list[tuple[str, Any, Any]] = [
        (f"model.{f.name}", getattr(base.config.model, f.name), getattr(copy.config.model, f.name))
        for f in fields(ModelConfig)
        if f.name not in skip
    ]
    ours, theirs = base.config.ponder, copy.config.ponder
    pairs += [("ponder.method", ours.method, theirs.method), ("ponder.options", ours.options, theirs.options)]
    scales = [embedding_scale(one.config.model, method_of(one.config)) for one in (base, copy)]
    pairs.append(("model.embedding_scale", scales[0], scales[1]))  # auto has a value
    for name, mine, other in pairs:
        if mine != other:
            raise UserError(
                f"{copy.name} = {copy.path}: {name} = {other!r}, and the base has {mine!r}; only copies of one base "
                "can be merged."
            )
    for name, tensor in base.stored.tensors.items():
        there = copy.stored.tensors.get(name)
        if there is None or there.size != tensor.size:
            what = "it has no" if there is None else f"with shape {list(there.size)} it has another"
            raise UserError(f"{copy.name} = {copy.path}: {what} {name} than the base; only its copies can be merged.")


def refuse_other_weights(copy: Dense, name: str, base: Tensor, theirs: Tensor) -> None:
    """UserError if a tensor outside of the MLPs is not the base's, in the format in which the copy keeps it."""
    if torch.equal(base.to(theirs.dtype), theirs):
        return
    far = float((theirs.double() - base.double()).abs().max())
    raise UserError(
        f"{copy.name} = {copy.path}: {name} differs from the base's by up to {far:.1e}, and only MLPs may; train "
        "copies with train.only: [mlp], or leave this one out."
    )
