"""HuRef: terms of the last two layers in which changes of basis cancel, over chosen rare tokens (arXiv 2312.04828).

    X = embeddings of n tokens [n, d]
    T_qk = X Wq^T Wk X^T      T_vo = X Wv^T Wo^T X^T      T_ff = X Wu^T Wd^T X^T
    ICS = cosine of the six matrices after each is standardised, that is, the mean of their six correlations

`official` is the published form with every format's true matrices: with a gate it takes the product Wg Wu elementwise
for Wu, it leaves gains of norms out, and has no form for grouped keys and values.  `robust` is this project's: gains
are folded in, the gate is left out (the product loses signs, so rotations and flips would change it), and a group's
keys and values are repeated for its query heads.  The paper takes 4096 tokens and draws a picture with a trained
network, which is not part of this project.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaponder import files
from megaponder.data.indexed import read_index
from megaponder.errors import ConfigError, UserError
from megaponder.lineage.awm import Mode
from megaponder.lineage.weights import Model, expanded, shared

TERMS = ("qk", "vo", "ff")
LAYERS = 2
"""Last layers that the terms come from."""
LARGEST = 1 << 30
"""Bytes of a fingerprint: six matrices of 4096 x 4096 in FP32 have 0.4 GB."""


@dataclass(frozen=True)
class Fingerprint:
    """The terms of one model."""

    name: str
    mode: Mode
    ids: tuple[int, ...]
    tokens: tuple[str, ...] | None
    """What the model's tokenizer calls them."""
    terms: Tensor
    """[layers * 3, n, n]: qk, vo and ff of the last but one layer, then of the last."""


@dataclass(frozen=True)
class Huref:
    """The agreement of two fingerprints."""

    correlations: tuple[float, ...]
    """Of the terms, in the order of `Fingerprint.terms`."""
    tokens: int

    @property
    def score(self) -> float:
        """ICS: 1 for the same model, about 0 for independent ones."""
        return sum(self.correlations) / len(self.correlations)


def terms(model: Model, ids: Tensor, mode: Mode = "official") -> Tensor:
    """[layers * 3, n, n] in float64; UserError where the published form has none."""
    if mode == "official" and model.heads != model.groups:
        raise UserError(
            f"{model.name}: HuRef as published has no form for {model.groups} key/value heads of {model.heads} query "
            "heads; use --mode robust."
        )
    x, out = model.embedding[ids], []
    for layer in model.layers[-LAYERS:]:
        layer = layer.folded() if mode == "robust" else layer
        k, v = expanded(model, layer)
        up = layer.up if mode == "robust" or layer.gate is None else layer.gate * layer.up
        for left, right in ((layer.q, k.T), (v, layer.o), (up, layer.down)):
            out.append((x @ left.T) @ (x @ right).T)
    return torch.stack(out)


def fingerprint(model: Model, ids: Tensor, mode: Mode = "official") -> Fingerprint:
    """The terms of a model over some of its tokens."""
    named = None
    if model.tokens is not None:
        names = {i: name for name, i in model.tokens.items()}
        named = tuple(names.get(int(i), "") for i in ids)
    return Fingerprint(model.name, mode, tuple(map(int, ids)), named, terms(model, ids, mode))


def compare(a: Fingerprint, b: Fingerprint) -> Huref:
    """ICS; UserError if the terms are not of the same kind, tokens and number of layers."""
    if a.mode != b.mode:
        raise UserError(f"{a.name} and {b.name}: one has {a.mode} terms, the other {b.mode} ones; make both alike.")
    same = a.ids == b.ids if None in (a.tokens, b.tokens) else a.tokens == b.tokens
    if not same:
        raise UserError(f"{a.name} and {b.name}: their terms are of different tokens; make both with the same tokens.")
    if len(a.terms) != len(b.terms):
        raise UserError(f"{a.name} and {b.name}: one has a single layer, so their terms cannot be compared.")
    return Huref(correlations(standardised(a.terms), standardised(b.terms)), len(a.ids))


def correlations(a: Tensor, b: Tensor) -> tuple[float, ...]:
    """Of each matrix of standardised ones."""
    return tuple((a * b).flatten(1).sum(1).tolist())


def standardised(matrices: Tensor) -> Tensor:
    """Each with mean 0 and length 1 (so that products are correlations); zeros if it is constant."""
    centred = matrices.double() - matrices.double().mean((1, 2), keepdim=True)
    return centred / centred.flatten(1).norm(dim=1).clamp_min(1e-300)[:, None, None]


def choose(a: Model, b: Model, count: int, order: list[int] | None, by_id: bool = False) -> tuple[Tensor, Tensor]:
    """Ids of `count` shared tokens in both models, or of all if there are fewer.

    `order`: ids of the first model from the commonest to the rarest; its last shared ones are taken, as published.
    Without it the highest ids are taken: in vocabularies made by merges these are rare (a choice of this project).
    """
    ours, theirs = shared(a, b, by_id)
    if order is not None:
        place = {int(i): n for n, i in enumerate(ours)}
        rows = torch.tensor([place[i] for i in order if i in place], dtype=torch.long)
        if not len(rows):
            raise UserError(f"{a.name} and {b.name}: none of the named tokens is in both vocabularies.")
        ours, theirs = ours[rows], theirs[rows]
    return ours[-count:], theirs[-count:]


def by_frequency(prefix: str, vocab_size: int) -> list[int]:
    """Ids that occur in an indexed dataset, the commonest first; of equally common ones the higher id first."""
    index = read_index(prefix)
    counts = np.zeros(vocab_size, dtype=np.int64)
    ids = np.memmap(f"{prefix}.bin", dtype=index.dtype, mode="r", shape=(index.tokens,))
    for at in range(0, len(ids), 1 << 24):
        block = ids[at : at + (1 << 24)]
        if len(block) and int(block.max()) >= vocab_size:
            raise UserError(f"--data {prefix}: it has token {int(block.max())}; the model's vocabulary ends before it.")
        counts += np.bincount(block, minlength=vocab_size)
    there = np.flatnonzero(counts)
    return [int(i) for i in sorted(there, key=lambda i: (counts[i], i), reverse=True)]


def listed(path: Path) -> list[int]:
    """Ids from a file with one in each line, the commonest first, as HuRef's code writes them."""
    try:
        return [int(line) for line in files.read_bounded(path, 1 << 26).decode().split()]
    except FileNotFoundError:
        raise UserError(f"--tokens {path}: there is no such file.") from None
    except ValueError:
        raise ConfigError("--tokens", str(path), "it must have one token id in each line", "write ids") from None


def save(found: Fingerprint, path: Path) -> None:
    """Write a fingerprint (.npz, terms in FP32).  Its terms tell much about the weights: it is as private as they
    are."""
    told = {"name": found.name, "mode": found.mode, "ids": found.ids, "tokens": found.tokens}
    with path.open("wb") as file:
        np.savez(file, terms=found.terms.float().numpy(), told=np.frombuffer(json.dumps(told).encode(), np.uint8))


def read(path: Path) -> Fingerprint:
    """A fingerprint that `save` wrote; UserError for anything else, and nothing is unpickled."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        with np.load(path, allow_pickle=False) as stored:
            told: dict[str, Any] = json.loads(stored["told"].tobytes())
            found = torch.from_numpy(stored["terms"])
        tokens = None if told["tokens"] is None else tuple(map(str, told["tokens"]))
        made = Fingerprint(str(told["name"]), told["mode"], tuple(map(int, told["ids"])), tokens, found)
        if found.dim() != 3 or found.shape[1:] != (len(made.ids),) * 2 or not found.isfinite().all():
            raise ValueError("its terms do not fit its tokens")
        return made
    except FileNotFoundError:
        raise UserError(f"There is no fingerprint {path}.") from None
    except Exception as error:  # whatever a file that is no archive causes
        raise UserError(f"{path} is not a fingerprint of megaponder lineage huref ({error}).") from None


def of_tokens(model: Model, like: Fingerprint) -> Fingerprint:
    """The terms of a model over the tokens of a fingerprint, by their names if both know them, otherwise by id."""
    if like.tokens is not None and model.tokens is not None:
        lacking = next((name for name in like.tokens if name not in model.tokens), None)
        if lacking is not None:
            raise UserError(f"{model.name}: its tokenizer has no token {lacking!r}, which {like.name} was read at.")
        ids = [model.tokens[name] for name in like.tokens]
    else:
        ids = list(like.ids)
    if max(ids) >= len(model.embedding):
        raise UserError(
            f"{model.name}: its vocabulary has {len(model.embedding):,} tokens; {like.name} names {max(ids)}."
        )
    return fingerprint(model, torch.tensor(ids), like.mode)
