"""The exit of a model, calibrated so that its risk against full depth is bounded: `megaponder calibrate`.

A text is a document of a held-out dataset, from its first token on, drawn at random.  Its risk is, in [0, 1],

    disagreement   the share of its tokens at which the likeliest next token is not that of full depth
    loss           max(0, mean over its tokens of loss - loss at full depth), in nats, at most 1

with the text given, so that each token is predicted from the true ones before it.  `guarantee` chooses the threshold.
What a text does is what decoding does: tokens that stop early leave the keys and values that they have to later ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaponder.config.schema import RunConfig
from megaponder.data.indexed import read_index
from megaponder.errors import ConfigError, UserError
from megaponder.export import names
from megaponder.export.load import build_model
from megaponder.inference import guarantee
from megaponder.inference.exit_rules import ExitRule, as_exiting, rule_of
from megaponder.inference.generate import device_of
from megaponder.ponder.settings import table_rows

MEASURES = ("disagreement", "loss")


@dataclass(frozen=True)
class Texts:
    """Token ids of each text, a token before the first target included."""

    ids: list[np.ndarray]
    data: str
    """Name of the dataset."""

    @property
    def checksum(self) -> str:
        """sha256 of all texts in order, lengths included."""
        digest = hashlib.sha256()
        for ids in self.ids:
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(ids, np.int64).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Calibrated:
    """A threshold and its guarantee; `config.json` has it as `confident_exit`."""

    by: str
    option: str
    threshold: float
    measure: str
    risk: float
    """The bound."""
    confidence: float
    texts: int
    length: int
    """Most tokens of a text."""
    seed: int
    data: str
    data_sha256: str
    observed_risk: float
    p_value: float
    depth: float | None
    """Mean passes of a token on the texts; None where the method does not tell them."""
    full_depth: float | None
    tested: list[dict[str, float | None]] = field(default_factory=list)
    """Every threshold that was tested, in order."""

    def __str__(self) -> str:
        words = {"disagreement": "another likeliest next token than full depth", "loss": "nats more than full depth"}
        share = f"{self.risk:.3g}" if self.measure == "loss" else f"{self.risk:.3g} of the tokens"
        return (
            f"Exit by {self.by} at {self.threshold:.6g}: with a confidence of {self.confidence:g}, at most {share} "
            f"{'' if self.measure == 'loss' else 'have '}{words[self.measure]}, in the mean over texts like the "
            f"{self.texts} of {self.data} (there: {self.observed_risk:.4f})."
        ) + ("" if self.depth is None else f" A token runs {self.depth:.2f} of {self.full_depth:.2f} passes.")


def read_texts(prefix: str, eod: int | None, count: int, length: int, seed: int) -> Texts:
    """`count` documents of a dataset, or all where it has fewer, at random, of at most `length` targets each."""
    index = read_index(prefix)
    edges = np.asarray(index.edges[:])
    found: list[np.ndarray] = []
    for document in np.random.default_rng(seed).permutation(len(edges) - 1):
        first, last = int(edges[document]), int(edges[document + 1])
        if last <= first or len(found) == count:
            continue
        begin = int(index.offsets[first]) // index.dtype.itemsize
        text = index.ids[begin : begin + min(index.tokens_in(first, last), length + (eod is None))].astype(np.int64)
        text = text if eod is None else np.concatenate([[eod], text])
        if len(text) > 1:
            found.append(text)
    return Texts(found, Path(prefix).name)


class Measured:
    """Risks of texts under a decoding model, threshold by threshold."""

    def __init__(self, model: Any, rule: ExitRule, texts: Texts, measure: str, batch: int = 16):
        self.model, self.rule, self.texts, self.measure = model, rule, texts, measure
        order = sorted(range(len(texts.ids)), key=lambda i: len(texts.ids[i]))
        self._batches = list(_of_one_length(texts.ids, order, 1 if rule.sequential else batch))
        self.rule.set(model, rule.full)
        full = [self._run(rows) for rows in self._batches]
        self._full = [(likeliest, losses) for likeliest, losses, _ in full]
        self.full_depth = self._mean_depth([depths for *_, depths in full])
        self.depths: dict[float, float | None] = {}
        """Mean passes by threshold."""

    def risks(self, threshold: float) -> np.ndarray:
        """Of each text, in the order of `texts`."""
        value, found = self.rule.set(self.model, threshold), np.zeros(len(self.texts.ids))
        depths = []
        for rows, (likeliest, losses) in zip(self._batches, self._full, strict=True):
            now, cost, depth = self._run(rows)
            depths.append(depth)
            if self.measure == "loss":
                found[rows] = (cost - losses).mean(1).clamp(0, 1).numpy()
            else:
                found[rows] = (now != likeliest).double().mean(1).numpy()
        self.depths[threshold] = self.depths[value] = self._mean_depth(depths)
        return found

    def _mean_depth(self, depths: Sequence[Tensor | None]) -> float | None:
        known = [d.double().flatten() for d in depths if d is not None]
        return float(torch.cat(known).mean()) if known else None

    @torch.no_grad()
    def _run(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """(likeliest next token, loss, passes) of every target, [b, n]."""
        text = torch.from_numpy(np.stack([self.texts.ids[i] for i in rows])).to(self.model.device)
        ids, targets = text[:, :-1], text[:, 1:]
        if self.rule.sequential:
            from megaponder.decoding.model import CACHE_FIELD

            cache, parts, seen = None, [], []
            for i in range(ids.shape[1]):
                out = self.model(ids[:, i : i + 1], use_cache=True, output_depths=True, **{CACHE_FIELD: cache})
                cache = out[CACHE_FIELD]
                parts.append(out.logits)
                seen.append(out.depths)
            logits, depths = torch.cat(parts, 1), torch.cat(seen, 1)
        else:
            out = self.model(ids, use_cache=False, output_depths=True, **self.model.ponder.as_decoded)
            logits, depths = out.logits, out.depths
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return logits.argmax(-1).cpu(), losses.double().cpu(), None if depths is None else depths.cpu()


def _of_one_length(ids: Sequence[np.ndarray], order: Sequence[int], batch: int) -> Iterator[list[int]]:
    rows: list[int] = []
    for i in order:
        if rows and (len(rows) == batch or len(ids[rows[0]]) != len(ids[i])):
            yield rows
            rows = []
        rows.append(i)
    if rows:
        yield rows


def check_numbers(risk: float, confidence: float, measure: str) -> None:
    """ConfigError for what no calibration can promise."""
    for name, value, fix in (("--risk", risk, "use 0.05"), ("--confidence", confidence, "use 0.95")):
        if not 0 < value < 1:
            raise ConfigError(name, value, "it must be more than 0 and less than 1", fix)
    if measure not in MEASURES:
        raise ConfigError("--measure", measure, f"it must be {' or '.join(MEASURES)}", "use disagreement")


def exiting_model(cfg: RunConfig, state: dict[str, Tensor], device: str | None = None) -> tuple[RunConfig, Any]:
    """The model in its decoding form, in FP32 on a device, and its configuration (`exit_rules.as_exiting`)."""
    cfg = as_exiting(cfg)
    device = device_of(device)
    plain = names.to_plain(state, cfg.model, table_rows(cfg))
    return cfg, build_model(cfg, {n: t.float() for n, t in plain.items()}).to(device)


def of_model(
    cfg: RunConfig, model: Any, texts: Texts, *, risk: float, confidence: float, measure: str, length: int, seed: int,
    by: str | None = None, grid: Sequence[float] | None = None, batch: int = 16, stored: torch.dtype = torch.float32,
) -> tuple[Calibrated, ExitRule]:  # fmt: skip
    """The threshold of the grid that saves most, of those with the guarantee, and the rule that it belongs to; the
    model is left with it.

    UserError for too few texts, and where not even the safest threshold has it; the model is then at full depth.
    """
    check_numbers(risk, confidence, measure)
    rule = rule_of(cfg, model, by, grid, stored)
    n, least = len(texts.ids), guarantee.fewest(risk, confidence)
    if n < least:
        raise UserError(
            f"{texts.data} has {n} texts, and a risk of {risk:g} with a confidence of {confidence:g} needs at least "
            f"{least}, even if no text has any; more text, a larger --risk or a smaller --confidence will do."
        )
    measured = Measured(model, rule, texts, measure, batch)
    mean_risk = lambda x: float(measured.risks(x).mean())  # noqa: E731
    at, tested = guarantee.fixed_sequence(rule.grid, mean_risk, n, risk, confidence)
    if at is None:
        rule.set(model, rule.full)
        first = tested[0]
        raise UserError(
            f"no exit by {rule.by} has a risk of at most {risk:g} with a confidence of {confidence:g}: at the safest, "
            f"{first.threshold:g}, it is {first.risk:.4f} on {n} texts; use a larger --risk, more --texts, or no exit."
        )
    value = rule.set(model, tested[at].threshold)
    found = Calibrated(
        rule.by, rule.option, value, measure, risk, confidence, n, length, seed, texts.data, texts.checksum,
        tested[at].risk, tested[at].p, measured.depths[tested[at].threshold], measured.full_depth,
        [asdict(t) | {"depth": measured.depths[t.threshold]} for t in tested],
    )  # fmt: skip
    return found, rule
