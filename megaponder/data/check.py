"""Everything about the data that can be checked before a process group exists; no torch.

`check_data` reads headers and descriptions, never all tokens.  Each mistake is reported in one sentence that names
field and file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from megaponder.config.schema import DataConfig, RunConfig
from megaponder.data.blend import Source, parse_blend, split_ranges, valid_sources
from megaponder.data.chat import of_datasets
from megaponder.data.document_length import document_tokens
from megaponder.data.epochs import steps_of_epochs
from megaponder.data.identity import Identity, identify_all, refuse_unwritten
from megaponder.data.indexed import read_index
from megaponder.data.info import DatasetMeta, read_meta
from megaponder.data.sources import Opened, SourceFacts
from megaponder.errors import ConfigError, UserError


@dataclass(frozen=True)
class DataFacts:
    """What the datasets determine for a run."""

    train: list[SourceFacts]
    valid: dict[str, list[SourceFacts]]
    """By the names of `data.valid`, "" where it has none; empty when there is no evaluation."""
    vocab_size: int
    """model.vocab_size, or the datasets' if that is not set."""
    eod_id: int | None
    """data.eod_id, or the datasets' if that is not set."""
    tokenizer_fingerprint: str | None
    """None when no dataset has a description."""
    document_tokens: float | None = None
    """data.document_tokens, or the datasets' if that is not set; None without data.document_attention."""
    steps: int | None = None
    """Those of train.epochs; None if that is not set."""

    @property
    def train_tokens(self) -> int:
        """Tokens of one epoch over all training sources."""
        return sum(source.tokens for source in self.train)


def all_sources(data: DataConfig) -> list[Source]:
    """Of the blends for training and validation."""
    valid = [source for sources in valid_sources(data).values() for source in sources]
    return parse_blend(data.train, "data.train") + valid


def open_data(data: DataConfig) -> dict[str, Opened]:
    """Every dataset that the blends read, by path.

    UserError for a missing or damaged file, and for one with a region that was never written (data.accept_zeros).
    """
    opened: dict[str, Opened] = {}
    accepted = {os.path.normpath(path) for path in data.accept_zeros}
    for source in all_sources(data):
        if source.path not in opened:
            index = read_index(source.path)
            opened[source.path] = Opened(index, read_meta(index))
            if os.path.normpath(source.path) not in accepted:
                refuse_unwritten(source.path, index)
    return opened


def identities(opened: dict[str, Opened]) -> dict[str, Identity]:
    """Of each opened dataset."""
    return identify_all({path: (one.index, one.meta) for path, one in opened.items()})


def earlier_identity(one: Opened) -> str:
    """What checkpoints of earlier versions record about a dataset: a hash of lengths, and checksums if known."""
    sums = "".join(f"-{crc:08x}" for _, crc in sorted(one.meta.checksums.items())) if one.meta else ""
    return one.index.fingerprint()[:16] + sums


def _same_tokenizer(opened: dict[str, Opened]) -> DatasetMeta | None:
    """The description shared by all sources that have one."""
    first: tuple[str, DatasetMeta] | None = None
    for path, source in opened.items():
        meta = source.meta
        if meta is None:
            continue
        if first is None:
            first = (path, meta)
        for name in ("tokenizer_fingerprint", "vocab_size", "eod_id"):
            mine, other = getattr(meta, name), getattr(first[1], name)
            if mine != other:
                raise UserError(
                    f"The sources of a blend must share one tokenizer: {name} is {other} in {first[0]} but {mine} in "
                    f"{path}; prepare one of them again with the tokenizer and EOD of the other."
                )
    return first[1] if first else None


def _vocab_size(size: int | None, meta: DatasetMeta | None, opened: dict[str, Opened]) -> int:
    if size is None:
        if meta is None:
            raise ConfigError(
                "model.vocab_size", None, "the datasets have no description that says", "set model.vocab_size"
            )
        size = meta.vocab_size
    if meta is not None and meta.vocab_size > size:
        raise ConfigError(
            "model.vocab_size", size, f"the datasets have {meta.vocab_size} ids", f"use {meta.vocab_size} or more"
        )
    for path, source in opened.items():
        largest = source.meta.max_id if source.meta else source.index.max_id()
        if largest >= size:
            raise ConfigError(
                "model.vocab_size", size, f"{path} contains token id {largest}", f"use {largest + 1} or more"
            )
    return size


def _eod_id(data: DataConfig, meta: DatasetMeta | None, vocab_size: int) -> int | None:
    wanted, eod = data.eod_id, meta.eod_id if meta else None
    if wanted is not None and eod is not None and wanted != eod:
        raise ConfigError("data.eod_id", wanted, f"the datasets end documents with {eod}", f"omit it or use {eod}")
    eod = eod if wanted is None else wanted
    if eod is None and data.loss_mask != "plain":
        raise ConfigError(
            "data.eod_id",
            None,
            f"loss_mask {data.loss_mask} requires it and the datasets do not say what it is",
            "set data.eod_id, or data.loss_mask to plain",
        )
    if eod is None and data.document_attention:
        rule = "documents are told apart by the end-of-document id, and the datasets do not say what it is"
        raise ConfigError("data.document_attention", True, rule, "set data.eod_id, or use false")
    if eod is not None and not 0 <= eod < vocab_size:
        raise ConfigError("data.eod_id", eod, f"must be a token id below {vocab_size}", f"use 0 to {vocab_size - 1}")
    return eod


def _facts(sources: list[Source], opened: dict[str, Opened], split: str | None, part: int) -> list[SourceFacts]:
    """Facts of a blend that uses all documents (split None) or part 0, 1, 2 of a split."""
    name = ("training", "validation", "test")[part]
    facts = []
    weights = [s.weight if s.weight is not None else float(opened[s.path].index.tokens) for s in sources]
    for source, weight in zip(sources, weights, strict=True):
        index = opened[source.path].index
        begin, end = (0, index.sequences) if split is None else split_ranges(split, index.sequences)[part]
        tokens = index.tokens_in(begin, end)
        if tokens == 0:
            raise UserError(
                f"data.split = {split!r}: {source.path} has {index.sequences} documents, which leaves none with text "
                f"for the {name} part; make that part larger, or set a separate validation dataset in data.valid."
                if split is not None
                else f"{source.path}: all documents are empty; prepare the dataset again."
            )
        talks = index.mask is not None
        facts.append(SourceFacts(source.path, weight / sum(weights), end - begin, tokens, talks))
    return facts


def _check_tokenizer(path: str | None, meta: DatasetMeta | None) -> None:
    if path is None or meta is None:
        return
    from megaponder.data.tokenizer import load_tokenizer  # imported here: the tokenizer libraries are slow to import

    found = load_tokenizer(path).fingerprint
    if found != meta.tokenizer_fingerprint:
        raise ConfigError(
            "data.tokenizer",
            path,
            f"the datasets were made with another tokenizer ({meta.tokenizer}, {meta.tokenizer_fingerprint[:12]}, not "
            f"{found[:12]})",
            f"use {meta.tokenizer}, or prepare the datasets again",
        )


def _check_conversations(
    data: DataConfig, train: list[SourceFacts], valid: list[SourceFacts], opened: dict[str, Opened]
) -> None:
    """ConfigError if prompts would be learnt unasked, or if answers are asked for where there are none."""
    own = [source.path for source in train if source.conversations]
    if data.loss_mask == "answers" and not own:
        rule = "none of the datasets of data.train holds conversations"
        fix = "prepare them with `megaponder prepare --template`, or use ignore_eod_target"
        raise ConfigError("data.loss_mask", "answers", rule, fix)
    of_datasets((path, opened[path].meta) for path in own)  # they must share a template
    found = own + [source.path for source in valid if source.conversations]
    if data.loss_mask not in ("answers", "plain") and found:
        where = "answers" if own else "data.valid without it (megaponder eval --data reads it)"
        rule = f"{found[0]} holds conversations, of which only the answers are learnt"
        raise ConfigError("data.loss_mask", data.loss_mask, rule, f"use {where}")


def check_data(cfg: RunConfig, opened: dict[str, Opened] | None = None) -> DataFacts:
    """Check the `data` section against the files on disk, or against those that `open_data` has opened.

    Raises ConfigError or UserError for a missing or damaged file, sources of different tokenizers, ids beyond
    model.vocab_size, an unknown EOD id that the loss mask needs, and a split that leaves a part without documents.
    """
    train = parse_blend(cfg.data.train, "data.train")
    if not train:
        raise ConfigError("data.train", [], "there is nothing to train on", "set it to the path of a prepared dataset")
    valid = valid_sources(cfg.data)
    opened = open_data(cfg.data) if opened is None else opened
    meta = _same_tokenizer(opened)
    vocab_size = _vocab_size(cfg.model.vocab_size, meta, opened)
    eod_id = _eod_id(cfg.data, meta, vocab_size)
    _check_tokenizer(cfg.data.tokenizer, meta)
    evaluates = cfg.train.eval_batches > 0
    split = None if valid else cfg.data.split
    read = (valid or {"": train}) if evaluates else {}
    sets = {name: _facts(sources, opened, split, 1) for name, sources in read.items()}
    train_facts = _facts(train, opened, split, 0)
    _check_conversations(cfg.data, train_facts, [one for blend in sets.values() for one in blend], opened)
    tokens = cfg.data.document_tokens
    if cfg.data.document_attention and tokens is None:
        length = cfg.data.sequence_length
        tokens = sum(s.weight * document_tokens(opened[s.path].index, length) for s in train_facts)
    steps = steps_of_epochs(cfg, train_facts, opened)
    fingerprint = meta.tokenizer_fingerprint if meta else None
    return DataFacts(train_facts, sets, vocab_size, eod_id, fingerprint, tokens, steps)


def fill_from_data(cfg: RunConfig, facts: DataFacts) -> RunConfig:
    """Copy of `cfg` with model.vocab_size, data.eod_id, data.document_tokens and the steps of train.epochs filled from
    the datasets."""
    return replace(
        cfg,
        model=replace(cfg.model, vocab_size=facts.vocab_size),
        data=replace(cfg.data, eod_id=facts.eod_id, document_tokens=facts.document_tokens),
        train=cfg.train if facts.steps is None else replace(cfg.train, steps=facts.steps),
    )
