"""Loss of a model over whole held-out datasets: every token that counts is a target exactly once.

A dataset is read in the order in which it is stored, behind one end-of-document token, and cut into windows of the
model's sequence length that do not overlap; the last one is filled up with positions that do not count.  Of
conversations, the answers are the targets, and each conversation is read whole, beside others that it does not see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from megaponder.config.schema import RunConfig
from megaponder.data.batch import MicroBatch, batch_of, make_micro_batch
from megaponder.data.indexed import Index, read_index
from megaponder.data.info import DatasetMeta, read_meta
from megaponder.data.packing import in_stored_order
from megaponder.engine import depth
from megaponder.errors import ConfigError, UserError
from megaponder.plan.flops import inference_flops
from megaponder.ponder.settings import method_of, table_rows

if TYPE_CHECKING:
    from megaponder.engine.step import Engine
    from megaponder.ponder.base import Method


@dataclass(frozen=True)
class Reading:
    """How a dataset is read, and which of its targets."""

    batch: int = 8
    """Windows at a time."""
    length: int | None = None
    """Tokens of a window; None: data.sequence_length."""
    limit: int | None = None
    """Targets at most; None: all."""
    skip: int = 0
    """Targets before them."""


@dataclass(frozen=True)
class Score:
    """What a model makes of a text."""

    targets: int
    """Tokens that count."""
    nats: float
    """Their negative log-likelihoods, summed."""
    text_bytes: int | None
    """UTF-8 bytes of the text; None where the dataset does not tell, or only a part of it was read."""
    means: Mapping[str, float]
    """Statistics of the method, as means over the targets (`engine.depth`)."""
    flops: float
    """Forward FLOPs of a token in decoding, at the depth that the tokens had."""

    @property
    def loss(self) -> float:
        """Nats per target."""
        return self.nats / max(1, self.targets)

    @property
    def perplexity(self) -> float:
        """exp of the loss."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of all targets per byte of text; with a tokenizer of any size, the same measure."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None

    @property
    def stats(self) -> dict[str, float]:
        """`engine.depth.metrics`, and the losses read out after earlier passes."""
        return depth.metrics(self.means, self.loss)

    def values(self) -> dict[str, Any]:
        """All of it, for JSON."""
        told = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {**told, "targets": self.targets, "bytes": self.text_bytes, "flops_per_token": self.flops, **self.stats}


WHOLE = Reading()
"""All of it, in windows of the training's length."""


def together(scores: Sequence[Score]) -> Score:
    """The score of all texts as one."""
    targets = sum(s.targets for s in scores)
    known = [s.text_bytes for s in scores if s.text_bytes is not None]
    names = scores[0].means.keys()
    return Score(
        targets,
        sum(s.nats for s in scores),
        sum(known) if len(known) == len(scores) else None,
        {n: sum(s.means[n] * s.targets for s in scores) / max(1, targets) for n in names},
        sum(s.flops * s.targets for s in scores) / max(1, targets),
    )


def read_model(path: str | Path, ema: bool = False) -> tuple[RunConfig, dict[str, Tensor]]:
    """Configuration and weights of a checkpoint, of a run's newest one, or of an export (or other) folder.

    `ema`: the moving average of the weights, which checkpoints may have.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        from megaponder.checkpoint.weights import load_weights

        return load_weights(folder, ema)
    if ema:
        raise UserError(f"--ema: {folder} is an export, which has no moving average; export the run with --ema.")
    from megaponder.export import folder as hf_folder
    from megaponder.export import names
    from megaponder.export.import_config import run_config
    from megaponder.export.load import refuse_too_large
    from megaponder.export.plain import to_plain

    hf = hf_folder.read_config(folder)
    cfg = run_config(hf, folder, folder, frozenset())
    if cfg.data.eod_id is None:
        cfg = replace(cfg, data=replace(cfg.data, loss_mask="plain"))
    tensors = hf_folder.read_weights(folder)
    refuse_too_large(folder, hf, tensors)
    plain = to_plain(hf, tensors, cfg, folder)
    return cfg, names.to_stage(plain, cfg.model, table_rows(cfg))


def datasets(cfg: RunConfig, named: Sequence[str], flag: str = "--data") -> dict[str, str]:
    """Datasets by name, from words NAME=PREFIX or PREFIX; without any, those of data.valid; errors name `flag`.

    Raises UserError where there is none, for one that the model has no embeddings for, and for one of another
    tokenizer.
    """
    from megaponder.data.blend import prefix_of

    if not named:
        found = _of_run(cfg)
        if not found:
            raise UserError(
                "--data is missing, and data.valid of this model is empty; name a dataset that was not trained on, as "
                "in --data NAME=PREFIX (what data.split holds out is a part of one, which only training reads)."
            )
    else:
        found = {}
        for word in named:
            name, _, prefix = word.rpartition("=")
            prefix = prefix_of(prefix)
            name = name or Path(prefix).name
            if found.setdefault(name, prefix) != prefix:
                raise UserError(f"--data {word}: the name {name} is given twice; name each dataset by itself.")
    tokenizer = _tokenizer(cfg)
    for prefix in found.values():
        index = read_index(prefix)
        meta = read_meta(index)
        if meta and _of_another(tokenizer, meta):
            rule = f"it was prepared with another tokenizer than the model's ({meta.tokenizer})"
            raise ConfigError(flag, prefix, rule, "prepare the text with the model's own tokenizer")
        largest = meta.max_id if meta else index.max_id()
        assert cfg.model.vocab_size is not None
        if largest >= cfg.model.vocab_size:
            rule = f"it has token id {largest}, and the model has {cfg.model.vocab_size}"
            raise ConfigError(flag, prefix, rule, "prepare the text with the model's own tokenizer")
    return found


def _of_run(cfg: RunConfig) -> dict[str, str]:
    """The datasets of data.valid, each under a name of its own."""
    from megaponder.data.blend import valid_sources

    found: dict[str, str] = {}
    for name, sources in valid_sources(cfg.data).items():
        for source in dict.fromkeys(s.path for s in sources):
            short = name if name and len(sources) == 1 else Path(source).name
            if found.get(short, source) != source:
                short = source
            found[short] = source
    return found


def _tokenizer(cfg: RunConfig) -> tuple[str, str, int]:
    """Kind, fingerprint and size of the tokenizer that the model was trained with; empty where nothing says it."""
    from megaponder.data.blend import parse_blend
    from megaponder.data.tokenizer import load_tokenizer

    try:
        if cfg.data.tokenizer:
            tokenizer = load_tokenizer(cfg.data.tokenizer)
            return tokenizer.kind, tokenizer.fingerprint, tokenizer.vocab_size
        for source in parse_blend(cfg.data.train, "data.train"):
            if meta := read_meta(read_index(source.path)):
                return meta.tokenizer_kind, meta.tokenizer_fingerprint, meta.vocab_size
    except UserError:
        pass  # they lie elsewhere
    return "", "", 0


def _of_another(tokenizer: tuple[str, str, int], meta: DatasetMeta) -> bool:
    """Whether a dataset is of another tokenizer than `_tokenizer`.

    An export holds SentencePiece and bytes in another form, with another fingerprint; that of bytes has as many ids.
    """
    kind, fingerprint, size = tokenizer
    if kind == meta.tokenizer_kind:
        return fingerprint != meta.tokenizer_fingerprint
    return bool(kind) and "bytes" in (kind, meta.tokenizer_kind) and size != meta.vocab_size


def windows(
    index: Index, length: int, eod_id: int | None, limit: int | None = None, skip: int = 0
) -> Iterator[tuple[np.ndarray, int]]:
    """(length + 1 token ids, targets that are real) one after another; `limit` targets at most, after `skip` others."""
    ahead = 0 if eod_id is None else 1  # the first token is then a target, too
    total = index.tokens + ahead - 1 if limit is None else min(skip + limit, index.tokens + ahead - 1)
    for begin in range(skip, total, length):
        real = min(length, total - begin)
        first = begin - ahead
        part = index.ids[max(0, first) : first + real + 1].astype(np.int64)
        if first < 0:
            part = np.concatenate([[eod_id], part])
        yield np.pad(part, (0, length - real)), real


def batches(index: Index, cfg: RunConfig, reading: Reading) -> Iterator[tuple[MicroBatch, int]]:
    """Micro-batches of `reading.batch` windows, the last one filled up, and how many tokens of each count."""
    if index.mask is not None:
        yield from _conversations(index, cfg, reading)
        return
    batch, length = reading.batch, reading.length or cfg.data.sequence_length
    waiting: list[tuple[np.ndarray, int]] = []

    def made() -> tuple[MicroBatch, int]:
        filled = [*waiting, *[(np.zeros(length + 1, np.int64), 0)] * (batch - len(waiting))]
        text, data = np.stack([text for text, _ in filled]), cfg.data
        out = make_micro_batch(text, data.loss_mask, data.eod_id, data.document_attention)
        for row, (_, real) in enumerate(filled):
            out.loss_mask_bn[row, real:] = 0.0
        return out, int(out.loss_mask_bn.sum())

    for window in windows(index, length, cfg.data.eod_id, reading.limit, reading.skip):
        waiting.append(window)
        if len(waiting) == batch:
            yield made()
            waiting = []
    if waiting:
        yield made()


def _conversations(index: Index, cfg: RunConfig, reading: Reading) -> Iterator[tuple[MicroBatch, int]]:
    """`batches` of conversations: the targets before `skip` and after `limit` do not count."""
    padding, data, seen = cfg.data.eod_id or 0, cfg.data, 0
    batch, length, skip = reading.batch, reading.length or data.sequence_length, reading.skip
    end = math.inf if reading.limit is None else skip + reading.limit
    empty = dict(text=np.full(length + 1, padding), targets=np.zeros(length), starts=np.zeros(length))
    waiting: list[dict[str, np.ndarray]] = []
    whole = in_stored_order(index, length, padding)
    while seen < end:
        item = next(whole, None)
        if item is not None:
            number = seen + np.cumsum(item["targets"])
            seen = int(number[-1])
            counted = item["targets"] * (number > skip) * (number <= end)
            if counted.any():
                waiting.append(item | {"targets": counted})
        if waiting and (item is None or seen >= end or len(waiting) == batch):
            made = batch_of([*waiting, *[empty] * (batch - len(waiting))], data.loss_mask, data.eod_id, True)
            yield made, int(made.loss_mask_bn.sum())
            waiting = []
        if item is None:
            return


@contextmanager
def deciding(method: Method) -> Iterator[None]:
    """The method as decoding runs it: what decoding leaves out is left out."""
    method.hard = True
    try:
        yield
    finally:
        method.hard = False


def score(engine: Engine, cfg: RunConfig, prefix: str, reading: Reading = WHOLE) -> Score:
    """The score of a dataset under a one-process engine, or under one of any layout whose data-parallel size is 1.

    What decoding leaves out is left out; of a method that weighs it in training instead, that loss stands beside it as
    `soft_loss`.
    """
    method = engine.stage.method
    found = decided(engine, cfg, prefix, reading)
    if not method.weighs or method.window is not None:
        return found
    soft = _score(engine, cfg, prefix, reading)
    return replace(found, means={**found.means, "soft_loss": soft.loss})


def decided(engine: Engine, cfg: RunConfig, prefix: str, reading: Reading = WHOLE) -> Score:
    """`score` without `soft_loss`."""
    with deciding(engine.stage.method):
        return _score(engine, cfg, prefix, reading)


def _score(engine: Engine, cfg: RunConfig, prefix: str, reading: Reading) -> Score:
    index = read_index(prefix)
    whole = not reading.skip and (reading.limit is None or reading.limit >= index.tokens)
    meta = read_meta(index) if whole else None
    text_bytes = meta.text_bytes if meta is not None and meta.conversations is None else None
    length = reading.length or cfg.data.sequence_length
    sums: dict[str, float] = {"loss": 0.0}
    targets = 0
    for micro_batch, count in batches(index, cfg, reading):
        out = engine.forward_backward([micro_batch], 0, train=False)
        targets += count
        for name, mean in {"loss": out.loss, **out.stats}.items():
            sums[name] = sums.get(name, 0.0) + mean * count
    if targets == 0:
        raise UserError(f"{prefix}: no token of it counts as a target under data.loss_mask = {cfg.data.loss_mask}.")
    nats = sums.pop("loss")
    means = {name: value / targets for name, value in sums.items()}
    method = method_of(cfg)
    active = depth.active_shares(depth.metrics(means, nats / targets))
    flops = inference_flops(replace(cfg, data=replace(cfg.data, sequence_length=length)), method, active)
    return Score(targets, nats, text_bytes, means, flops)


def score_all(
    cfg: RunConfig, state: dict[str, Tensor], named: Mapping[str, str], reading: Reading = WHOLE
) -> dict[str, Score]:
    """Scores of several datasets under a whole model in this process, in FP32."""
    from megaponder.export import reference
    from megaponder.inference.variants import own_weights

    with reference.engine(cfg, own_weights(cfg, state)) as engine:
        return {name: score(engine, cfg, prefix, reading) for name, prefix in named.items()}
