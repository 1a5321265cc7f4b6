"""Rules on samples, blends and splits."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from megaponder.config.fields import nearest
from megaponder.config.rules.case import Case, Rule, require


def sequence_fits(c: Case) -> None:
    """A sample is no longer than the position table, or than the limit that exports state."""
    length, limit = c.cfg.data.sequence_length, c.cfg.model.max_positions
    assert limit is not None
    fix = f"the nearest is {limit}, or raise model.max_positions"
    rule = f"it is longer than model.max_positions = {limit}"
    require(length <= limit, "data.sequence_length", length, rule, fix)


def documents_lie_within_samples(c: Case) -> None:
    """Their length within a sample is at most the sample's, up to rounding, and counts only where they are apart."""
    data, name = c.cfg.data, "data.document_tokens"
    tokens, length = data.document_tokens, data.sequence_length
    if tokens is None:
        return
    rule = "without data.document_attention a token sees its whole sample"
    fix = "leave it out (null), or set data.document_attention: true"
    require(data.document_attention, name, tokens, rule, fix)
    rule = f"a document within its sample is no longer than data.sequence_length = {length}"
    fix = f"the nearest is {length}, or leave it out (null): it follows from the datasets"
    require(tokens <= length + 1e-6, name, tokens, rule, fix)


def eod_is_a_token(c: Case) -> None:
    """The end-of-document id is in the vocabulary."""
    eod, vocab = c.cfg.data.eod_id, c.cfg.model.vocab_size
    if eod is not None:
        ok = eod >= 0 and (vocab is None or eod < vocab)
        require(
            ok, "data.eod_id", eod, f"it must be an id of the vocabulary of {vocab}", "omit it: the dataset defines it"
        )


def method_fits_the_vocabulary(c: Case) -> None:
    """A token that the method needs has a row of its own in the embedding table; a top k is at most every token."""
    vocab = c.cfg.model.vocab_size
    if vocab is None:
        return
    for option, token in c.facts.token_rows.items():
        rule = f"it must be a row of the vocabulary of model.vocab_size = {vocab}"
        fix = f"the nearest is {vocab - 1}, or raise model.vocab_size by one and use {vocab}"
        require(token < vocab, f"ponder.options.{option}", token, rule, fix)
    for option, count in c.facts.token_counts.items():
        rule = f"it must be at most model.vocab_size = {vocab}"
        require(count <= vocab, f"ponder.options.{option}", count, rule, "use 0 for the full vocabulary")


def split_is_three_parts(c: Case) -> None:
    """Training, validation, test."""
    text, fix = c.cfg.data.split, "for example 969,30,1"
    try:
        parts = [float(p) for p in text.split(",")]
    except ValueError:
        parts = []
    ok = len(parts) == 3 and all(math.isfinite(p) and p >= 0 for p in parts)
    require(ok, "data.split", text, "it must be three numbers train,validation,test of at least 0", fix)
    require(parts[0] > 0, "data.split", text, "the training part must be positive", fix)
    needs_valid = c.cfg.train.eval_batches > 0 and not c.cfg.data.valid
    rule = "evaluation takes its sequences from the validation part, which is 0"
    require(parts[1] > 0 or not needs_valid, "data.split", text, rule, f"{fix}, or train.eval_batches: 0")


def _blends(c: Case) -> list[tuple[str, Sequence[str | float]]]:
    """(field, blend) of all blends."""
    data = c.cfg.data
    return [("data.train", data.train), *((data.valid_field(n), b) for n, b in data.valid_blends().items())]


def blends_are_well_formed(c: Case) -> None:
    """`path` or `weight path weight path ...`."""
    valid = c.cfg.data.valid
    for name, named in valid.items() if isinstance(valid, dict) else ():
        rule = "a name becomes part of a metric's name, so it must be letters, digits and underscores"
        fix = f"use {re.sub(r'[^A-Za-z0-9_]+', '_', name) or 'heldout'}"
        require(re.fullmatch(r"[A-Za-z0-9_]+", name) is not None, "data.valid", name, rule, fix)
        require(bool(named), f"data.valid.{name}", named, "it names no dataset", "remove it, or name a dataset")
    for field, blend in _blends(c):
        weights = [x for x in blend if not isinstance(x, str)]
        if not weights:
            ok = len(blend) <= 1
            fix = f"for example {_weighted(blend)} for equal shares"
            require(ok, field, blend, "several datasets need a weight before each", fix)
            continue
        pairs = len(blend) % 2 == 0 and all(
            isinstance(w, float) and isinstance(p, str) for w, p in zip(blend[::2], blend[1::2], strict=True)
        )
        require(pairs, field, blend, "it must be weight path weight path ...", "for example [0.3, wiki, 0.7, books]")
        good = all(math.isfinite(float(w)) and float(w) >= 0 for w in weights)
        require(good, field, blend, "no weight may be below 0", "a dataset of weight 0 is not read")
        require(
            any(float(w) > 0 for w in weights),
            field,
            blend,
            "all weights are 0",
            "give one of the datasets a positive weight",
        )


def accepted_datasets_are_used(c: Case) -> None:
    """An exception is made for a dataset of the blends; a wrong name would make none."""
    paths = [
        p.removesuffix(".bin").removesuffix(".idx") for _, blend in _blends(c) for p in blend if isinstance(p, str)
    ]
    for name in ("accept_changed", "accept_zeros"):
        for path in getattr(c.cfg.data, name):
            close = nearest(path, paths)
            fix = f"did you mean {close}" if close else f"they name {', '.join(paths[:8]) or 'none'}"
            known = os.path.normpath(path) in map(os.path.normpath, paths)
            require(known, f"data.{name}", path, "neither data.train nor data.valid contains this dataset", fix)


def _weighted(blend: Sequence[str | float]) -> str:
    return "[" + ", ".join(f"1.0, {path}" for path in blend) + "]"


def datasets_exist(c: Case) -> None:
    """Both files of every dataset are there."""
    if not c.needs_data:
        return
    fix = "set it to a dataset written by `megaponder prepare`"
    require(bool(c.cfg.data.train), "data.train", [], "training needs a dataset", fix)
    for field, blend in _blends(c):
        weights = [w for w in blend if not isinstance(w, str)] or [1.0] * len(blend)
        read = [p for p, w in zip((p for p in blend if isinstance(p, str)), weights, strict=False) if w != 0]
        for path in map(Path, read):
            for suffix in (".bin", ".idx"):
                require(
                    Path(f"{path}{suffix}").is_file(), field, str(path), f"there is no file {path}{suffix}",
                    _like(path, suffix),
                )  # fmt: skip


def _like(path: Path, suffix: str) -> str:
    folder = path.parent
    there = sorted(p.name.removesuffix(suffix) for p in folder.glob(f"*{suffix}")) if folder.is_dir() else []
    bare = path.name.removesuffix(".bin").removesuffix(".idx")
    close = bare if bare in there else nearest(path.name, there)
    if close:
        return f"did you mean {folder / close}"
    return f"{folder} has {', '.join(there[:8]) or 'no dataset'}"


RULES: tuple[Rule, ...] = (
    sequence_fits,
    documents_lie_within_samples,
    eod_is_a_token,
    method_fits_the_vocabulary,
    split_is_three_parts,
    blends_are_well_formed,
    accepted_datasets_are_used,
    datasets_exist,
)
