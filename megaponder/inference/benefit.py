"""What each pass brings to each token, who gets the passes, and whether the decisions are better than chance.

All of it is of one model on one text:

    losses      every token stops after k passes, for each k; benefit of pass k + 1: loss at k less loss at k + 1
    policy      the model's own depths, against the same depths shuffled over the tokens, and against its mean depth,
                rounded up or down at random
    decisions   after k passes: how well the score ranks tokens by what the next pass brings (Spearman), and what is
                gained if a share of the tokens goes on: those of the highest scores, any at random, those of the
                largest benefit (in hindsight: no rule can do better)
    classes     depth, loss and loss at each number of passes by kind of input token

The correlation of depth with the loss is reported as well, but says little: a rule that spends passes where the loss
cannot be helped maximises it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megaponder.config.schema import RunConfig
from megaponder.data.batch import MicroBatch
from megaponder.data.indexed import read_index
from megaponder.data.token_classes import CLASSES, TextClasses, bands
from megaponder.data.tokenizer import Tokenizer
from megaponder.inference.heldout import WHOLE, Reading, batches, deciding

if TYPE_CHECKING:
    from megaponder.engine.step import Engine

SHARES = (0.25, 0.5, 0.75)
"""Of the tokens that go on, for the gain of a decision; its own share is added."""
FEWEST = 20
"""Tokens below which a class is left out."""


@dataclass
class Tokens:
    """The tokens that count, one row each."""

    window: np.ndarray
    ids: np.ndarray
    kind: np.ndarray | None
    """Index into CLASSES; None where there is no tokenizer."""
    losses: np.ndarray
    """[passes, tokens]: the loss if every token stops after 1, 2, ... passes; one row if that has no meaning."""
    own: np.ndarray
    """The loss as the model is."""
    depth: np.ndarray | None
    """The model's own numbers of passes."""
    scores: dict[int, np.ndarray]
    """By number of passes: what decides about the next one."""
    shuffled: np.ndarray | None = None
    """The loss with the depths of other tokens."""
    uniform: np.ndarray | None = None
    """The loss with the mean depth for all, rounded at random."""


def analyse(
    engine: Engine,
    cfg: RunConfig,
    prefixes: Sequence[str],
    tokenizer: Tokenizer | None = None,
    reading: Reading = WHOLE,
) -> dict[str, Any]:
    """The numbers above, for JSON; a one-process engine."""
    parts = [
        micro_batch for prefix in prefixes for micro_batch, count in batches(read_index(prefix), cfg, reading) if count
    ]
    classes = TextClasses(tokenizer) if tokenizer is not None else None
    tokens = _measure(engine, parts, classes)
    common, names = bands(_counts(prefixes, cfg.model.vocab_size or 0))
    found: dict[str, Any] = {
        "targets": len(tokens.own),
        "windows": int(tokens.window.max()) + 1,
        "loss": _mean(tokens.own),
        "losses": [_mean(row) for row in tokens.losses],
    }
    if tokens.depth is not None:
        found["policy"] = _policy(tokens)
    found["decisions"] = [_decision(tokens, k) for k in range(1, len(tokens.losses))]
    by_text = [] if tokens.kind is None else list(_classes(tokens, "text", CLASSES, tokens.kind))
    found["classes"] = by_text + list(_classes(tokens, "frequency", names, common[tokens.ids]))
    return found


@torch.no_grad()
def _measure(engine: Engine, parts: Sequence[MicroBatch], classes: TextClasses | None) -> Tokens:
    """Runs the model over the text: as it is, at each number of passes, with other tokens' depths."""
    method, device = engine.stage.method, engine.groups.device

    def losses(batch: MicroBatch, forced: Tensor | None = None) -> tuple[Any, Tensor]:
        method.forced = None if forced is None else forced.to(device)
        out, found = engine.token_losses(batch)
        return out, found[-1]

    def run(forced: Sequence[Tensor]) -> np.ndarray:
        return _kept(parts, [losses(b, f)[1] for b, f in zip(parts, forced, strict=True)])

    try:
        with deciding(method):
            own = [engine.token_losses(b) for b in parts]
            read_out = [[found[k] for _, found in own] for k in range(len(own[0][1]))]
            tokens = Tokens(
                window=_kept(parts, list(_windows(parts))),
                ids=_kept(parts, [b.ids_bn.t() for b in parts]),
                kind=None if classes is None else _kept(parts, [_kinds(classes, b) for b in parts]),
                losses=np.stack([_kept(parts, values) for values in read_out]),
                own=_kept(parts, read_out[-1]),
                depth=None,
                scores={},
            )
            if not method.halts:
                return tokens
            deepest = method.max_depth()
            depths = [out.depth.cpu().long() for out, _ in own if out.depth is not None]
            tokens.depth = _kept(parts, depths)
            at = []
            for k in range(1, deepest + 1):
                forced = torch.tensor(k)
                ran = [losses(b, forced) for b in parts]
                at.append(_kept(parts, [found for _, found in ran]))
                if k == deepest:
                    for depth in ran[0][0].scores:
                        tokens.scores[depth] = _kept(parts, [out.scores[depth] for out, _ in ran])
            tokens.losses = np.stack(at)
            if tokens.depth.min() < tokens.depth.max():
                tokens.shuffled = run(_shuffled(parts, depths))
                tokens.uniform = run(_uniform(parts, float(tokens.depth.mean())))
            return tokens
    finally:
        method.forced = None


def _kept(parts: Sequence[MicroBatch], values_nb: Sequence[Tensor]) -> np.ndarray:
    """Values [n, b] of each batch as one row, without what does not count."""
    rows = [v.t()[b.loss_mask_bn > 0].cpu() for b, v in zip(parts, values_nb, strict=True)]
    return np.asarray(torch.cat(rows).double() if rows[0].is_floating_point() else torch.cat(rows))


def _kinds(classes: TextClasses, b: MicroBatch) -> Tensor:
    return torch.from_numpy(classes.of(b.ids_bn.numpy())).t()


def _windows(parts: Sequence[MicroBatch]) -> Iterator[Tensor]:
    """The number of each token's window; those in which nothing counts have none."""
    first = 0
    for b in parts:
        counts = (b.loss_mask_bn.sum(1) > 0).long()
        yield (first + counts.cumsum(0) - 1).expand(b.ids_bn.shape[1], -1)
        first += int(counts.sum())


def _shuffled(parts: Sequence[MicroBatch], depths: Sequence[Tensor]) -> list[Tensor]:
    """The depths of all tokens that count, in another order."""
    every = torch.cat([d.t()[b.loss_mask_bn > 0] for b, d in zip(parts, depths, strict=True)])
    every = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(1))]
    out, used = [], 0
    for b, d in zip(parts, depths, strict=True):
        counts = b.loss_mask_bn > 0
        mixed = d.t().clone()
        mixed[counts] = every[used : used + int(counts.sum())]
        used += int(counts.sum())
        out.append(mixed.t())
    return out


def _uniform(parts: Sequence[MicroBatch], mean: float) -> list[Tensor]:
    """floor(mean) or one more for every token, at random."""
    dice = torch.Generator().manual_seed(2)
    return [int(mean) + (torch.rand(b.ids_bn.t().shape, generator=dice) < mean - int(mean)).long() for b in parts]


def _counts(prefixes: Sequence[str], vocab_size: int) -> np.ndarray:
    """Occurrences of every token id in whole datasets."""
    total = np.zeros(vocab_size, np.int64)
    for prefix in prefixes:
        index = read_index(prefix)
        for begin in range(0, index.tokens, 1 << 22):
            total += np.bincount(index.ids[begin : begin + (1 << 22)], minlength=vocab_size)[:vocab_size]
    return total


def _policy(tokens: Tokens) -> dict[str, Any]:
    assert tokens.depth is not None
    depth, most = tokens.depth, len(tokens.losses)
    rows = np.arange(len(depth))
    last = np.clip(depth, 1, most) - 1
    brought = tokens.losses[0] - tokens.losses[last, rows]
    found: dict[str, Any] = {
        "depth": _mean(depth),
        "share_at_depth": [_mean(depth == k) for k in range(1, most + 1)],
        "loss_by_depth": {str(k): _mean(tokens.own[depth == k]) for k in range(1, most + 1) if (depth == k).any()},
        "depth_nll_correlation": _pearson(depth, tokens.own),
        "depth_benefit_rank_correlation": spearman(depth, tokens.losses[0] - tokens.losses[-1]),
        "benefit": _mean(brought),
    }
    for name in ("shuffled", "uniform"):
        other = getattr(tokens, name)
        if other is not None:
            difference, error = _paired(other - tokens.own, tokens.window)
            found[name] = {"loss": _mean(other), "minus_policy": difference, "standard_error": error}
    return found


def _decision(tokens: Tokens, k: int) -> dict[str, Any]:
    """After k passes: what one more brings, and what the score makes of it."""
    benefit = tokens.losses[k - 1] - tokens.losses[k]
    mean, error = _paired(benefit, tokens.window)
    found: dict[str, Any] = {"after": k, "benefit": mean, "standard_error": error, "helped": _mean(benefit > 0)}
    if tokens.depth is not None and (asked := (tokens.depth >= k).sum()):
        found["share"] = float((tokens.depth > k).sum() / asked)
    if k not in tokens.scores:
        return found
    score = tokens.scores[k]
    found["rank_correlation"] = spearman(score, benefit)
    own = found.get("share", 0.0)
    shares = sorted({*SHARES, *([own] if 0.01 < own < 0.99 else [])})
    found["gain"] = [
        {
            "share": share,
            "score": _gain(score, benefit, share),
            "random": share * mean,
            "hindsight": _gain(benefit, benefit, share),
        }
        for share in shares
    ]
    return found


def _gain(order: np.ndarray, benefit: np.ndarray, share: float) -> float:
    """Nats per token if the share of the tokens that is largest in `order` gets the benefit; ties share alike."""
    count = share * len(order)
    whole = min(int(count), len(order) - 1)
    limit = np.partition(order, len(order) - 1 - whole)[len(order) - 1 - whole]
    above, at = order > limit, order == limit
    rest = count - above.sum()
    return float((benefit[above].sum() + rest * benefit[at].mean()) / len(order))


def _classes(tokens: Tokens, by: str, labels: Sequence[str], index: np.ndarray) -> Iterator[dict[str, Any]]:
    for i, label in enumerate(labels):
        here = index == i
        if here.sum() < FEWEST:
            continue
        yield {
            "by": by,
            "class": label,
            "share": _mean(here),
            "depth": None if tokens.shuffled is None or tokens.depth is None else _mean(tokens.depth[here]),
            "loss": _mean(tokens.own[here]),
            "losses": [_mean(row[here]) for row in tokens.losses],
        }


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def _paired(values: np.ndarray, window: np.ndarray) -> tuple[float, float | None]:
    """Mean over tokens and its standard error, which windows of text, not tokens, are independent for."""
    counts = np.bincount(window)
    sums = np.bincount(window, weights=values)
    mean, n = values.mean(), len(counts)
    if n < 2:
        return float(mean), None
    residuals = sums - mean * counts
    return float(mean), float(np.sqrt(n / (n - 1) * (residuals**2).sum()) / counts.sum())


def _pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    """None where one of them does not vary."""
    if a.std() < 1e-12 or b.std() < 1e-12:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation; equal values share their mean rank; None where one does not vary."""
    return _pearson(_ranks(a), _ranks(b))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
