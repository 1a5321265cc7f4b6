"""AWM: do two models' query and key matrices agree once their residual streams are aligned by the embeddings?

    shared tokens: A = E1[ids1], B = E2[ids2], "base" = the wider one        C[i, j] = cos(A[:, i], B[:, j])
    p = assignment with the least sum of 1 - |C|,  s_j = sign C[p_j, j],     W' = W[:, p] s
    K = W'^T W', L = W2^T W2 without diagonals, U-centred;                   score = <K, L> / (|K| |L|)
    model: mean over layers of q and of k, and the mean of both; layers i with i, or by assignment if depths differ

`official` is this, as in the paper (arXiv 2510.06738) and its public code, in float64, with every format's true queries
and keys (that code cuts matrices which are ordered by heads into thirds).  `robust` is this project's: gains of norms
are folded into the matrices that read them, a group's queries and keys get equal Frobenius norms (not under QK-norm,
where that would change the function), layers are always assigned, and where widths are equal the best rotation between
the embeddings (Procrustes) is tried beside the signed permutation; the higher score counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megaponder.errors import UserError
from megaponder.lineage.assignment import assign
from megaponder.lineage.weights import Layer, Model

Mode = Literal["official", "robust"]
MODES: tuple[Mode, ...] = ("official", "robust")
LEAST = 1e-8
"""Squared norm of a centred matrix below which the public code calls a score 0."""


@dataclass(frozen=True)
class LayerScore:
    """Layer `first` of one model beside layer `second` of the other."""

    first: int
    second: int
    q: float
    k: float


@dataclass(frozen=True)
class Awm:
    """The agreement of two models."""

    q: float
    k: float
    layers: tuple[LayerScore, ...]
    alignment: str
    """permutation or rotation."""
    flipped: int
    """Channels whose sign the permutation changes."""
    agreement: float
    """Mean |cosine| of the channels that it matches."""

    @property
    def score(self) -> float:
        """The mean of q and k: 1 for the same model, about 0 for independent ones."""
        return (self.q + self.k) / 2


def compare(a: Model, b: Model, ids: tuple[Tensor, Tensor], mode: Mode = "official") -> Awm:
    """Compare two models by the tokens that they share (`weights.shared`).  UserError for models without layers."""
    for model in (a, b):
        if not model.layers or model.width < 4:
            raise UserError(f"{model.name}: AWM needs a layer and four channels; there are {len(model.layers)} layers.")
    if mode == "robust":
        a, b = prepared(a), prepared(b)
    tables = a.embedding[ids[0]], b.embedding[ids[1]]
    swapped = a.width < b.width
    base, target = (b, a) if swapped else (a, b)
    wide, narrow = reversed(tables) if swapped else tables
    index, sign, agreement = permutation(wide, narrow)
    turns: dict[str, Callable[[Tensor], Tensor]] = {"permutation": lambda w: w[:, index] * sign}
    if mode == "robust" and wide.shape[1] == narrow.shape[1] <= wide.shape[0]:
        turn = rotation(wide, narrow)
        turns["rotation"] = lambda w: w @ turn
    found = []
    for name, change in turns.items():
        q, k = (_scores(base, target, letter, change) for letter in "qk")
        q, k = (q.T, k.T) if swapped else (q, k)
        by_assignment = mode == "robust" or len(a.layers) != len(b.layers)
        rows = matched((q + k) / 2) if by_assignment else [(i, i) for i in range(len(a.layers))]
        layers = tuple(LayerScore(i, j, float(q[i, j]), float(k[i, j])) for i, j in rows)
        n = len(layers)
        means = sum(s.q for s in layers) / n, sum(s.k for s in layers) / n
        found.append(Awm(*means, layers, name, int((sign < 0).sum()), agreement))
    return max(found, key=lambda one: one.score)


def permutation(wide: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor, float]:
    """Of tables [n, D] and [n, d] with D >= d: the column of the first for each of the second [d], its sign [d], and
    the mean |cosine| of these pairs."""
    cosines = _unit(wide).T @ _unit(narrow)
    index = torch.from_numpy(assign((1 - cosines.abs()).T.numpy()))
    chosen = cosines[index, torch.arange(len(index))]
    return index, chosen.sign(), float(chosen.abs().mean())


def rotation(a: Tensor, b: Tensor) -> Tensor:
    """The orthogonal R [d, d] with the least |a R - b|."""
    u, _, v = torch.linalg.svd(a.T @ b)
    turn: Tensor = u @ v
    return turn


def prepared(model: Model) -> Model:
    """The same function with gains folded and, where nothing norms them, equal norms of each group's queries and
    keys."""
    model = model.folded()
    if model.qk_norm:
        return model
    return replace(model, layers=tuple(_even(layer, model.groups) for layer in model.layers))


def _even(layer: Layer, groups: int) -> Layer:
    q, k = layer.q.view(groups, -1, layer.q.shape[1]), layer.k.view(groups, -1, layer.k.shape[1])
    size_q, size_k = (w.flatten(1).norm(dim=1)[:, None, None] for w in (q, k))
    c = torch.where((size_q > 0) & (size_k > 0), (size_k / size_q).sqrt(), 1.0)
    return replace(layer, q=(q * c).flatten(0, 1), k=(k / c).flatten(0, 1))


def matched(scores: Tensor) -> list[tuple[int, int]]:
    """Pairs of layers with the highest sum of scores [L1, L2]; all layers of the shallower model are in one."""
    if scores.shape[0] > scores.shape[1]:
        return sorted((j, i) for i, j in matched(scores.T))
    return [(i, int(j)) for i, j in enumerate(assign(-scores.numpy()))]


def _scores(base: Model, target: Model, letter: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    """[layers of base, layers of target]"""
    left = [_gram(change(getattr(layer, letter))) for layer in base.layers]
    right = [_gram(getattr(layer, letter)) for layer in target.layers]
    return torch.stack(left) @ torch.stack(right).T


def _gram(w: Tensor) -> Tensor:
    """The U-centred linear Gram matrix of residual channels as a unit vector [d * d]."""
    gram, n = w.T @ w, w.shape[1]
    gram.fill_diagonal_(0.0)
    mean = gram.sum(0) / (n - 2)
    mean = mean - mean.sum() / (2 * (n - 1))
    gram = gram - mean[:, None] - mean[None]
    gram.fill_diagonal_(0.0)
    size = float(gram.square().sum())
    return gram.flatten() / size**0.5 if size >= LEAST else torch.zeros_like(gram.flatten())


def _unit(table: Tensor) -> Tensor:
    """Columns of length 1; columns of zeros stay."""
    return table / table.norm(dim=0).clamp_min(torch.finfo(table.dtype).tiny)
