"""The JSON beside an indexed dataset, and what `megaponder inspect` says of one."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import orjson

from megaponder.data.indexed import Index, read_index
from megaponder.errors import UserError


@dataclass(frozen=True)
class SourceFile:
    """An input file of a dataset."""

    path: str
    """As it was given."""
    bytes: int
    """Size on disk."""


@dataclass(frozen=True)
class DatasetMeta:
    """Contents of `<prefix>.json`."""

    tokenizer: str
    """Tokenizer file or folder as it was given, or "bytes"."""
    tokenizer_kind: str
    """huggingface, sentencepiece or bytes."""
    tokenizer_fingerprint: str
    """sha256 of the tokenizer's canonical content."""
    vocab_size: int
    """Largest id that the tokenizer can produce, plus one."""
    eod_id: int | None
    """Id that ends every document; None: documents end without one."""
    max_id: int
    """Largest id in the dataset."""
    documents: int
    """Documents written."""
    tokens: int
    """Tokens written, EOD included."""
    dtype: str
    """Number type of the ids on disk."""
    text_bytes: int
    """UTF-8 bytes of the documents' texts."""
    sources: list[SourceFile] = field(default_factory=list)
    """Input files in order."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Documents left out, by reason."""
    special_tokens: dict[str, int] = field(default_factory=dict)
    """The tokenizer's special tokens and their ids, by id; empty where an earlier version described the dataset."""
    format: str = "megaponder-dataset-1"
    """Version of this file."""

    def dump(self) -> bytes:
        """Readable JSON, the same bytes for the same dataset."""
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


@dataclass(frozen=True)
class DatasetInfo:
    """An indexed dataset as it lies on disk."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    bin_bytes: int
    shortest: int
    """Tokens of the shortest sequence."""
    longest: int
    """Tokens of the longest sequence."""
    meta: DatasetMeta | None
    """The JSON beside it; None for datasets of other tools."""


def _meta_from(data: Any, path: str) -> DatasetMeta:
    known = {f.name for f in fields(DatasetMeta)}
    if not isinstance(data, dict) or data.get("format") != DatasetMeta.format:
        raise UserError(f"{path}: not the description of a dataset of this program; move it away to load the dataset.")
    missing = sorted(known - data.keys() - {"special_tokens"})  # the first descriptions did without
    if missing:
        raise UserError(f"{path}: fields are missing ({', '.join(missing)}); prepare the dataset again.")
    values = {name: data[name] for name in known & data.keys()}
    values["sources"] = [SourceFile(**s) for s in data["sources"]]
    return DatasetMeta(**values)


def read_meta(index: Index) -> DatasetMeta | None:
    """The JSON beside a dataset, checked against it; None if there is none.

    Raises UserError when it is damaged or belongs to other files.
    """
    path = index.prefix + ".json"
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as stream:
            meta = _meta_from(orjson.loads(stream.read()), path)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}); prepare the dataset again.") from error
    here = (index.documents, index.tokens, index.dtype.name)
    if here != (meta.documents, meta.tokens, meta.dtype) or index.bin_bytes != index.tokens * index.dtype.itemsize:
        raise UserError(
            f"{path}: tells of {meta.documents} documents with {meta.tokens} {meta.dtype} tokens, but .bin/.idx hold "
            f"{here[0]} with {here[1]} {here[2]} in {index.bin_bytes} bytes; the files belong to different datasets."
        )
    return meta


def inspect_dataset(prefix: str | os.PathLike[str]) -> DatasetInfo:
    """Describe the indexed dataset at `prefix` (path without .bin/.idx); UserError if it is missing or damaged."""
    index = read_index(prefix)
    return DatasetInfo(
        index.prefix,
        index.documents,
        index.sequences,
        index.tokens,
        index.dtype.name,
        index.bin_bytes,
        int(np.min(index.lengths)),
        int(np.max(index.lengths)),
        read_meta(index),
    )
