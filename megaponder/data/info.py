"""The JSON file beside an indexed dataset, and what `megaponder inspect` says about a dataset."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import orjson
import pydantic

from megaponder.data.indexed import Index, read_index
from megaponder.errors import UserError
from megaponder.files import is_special, read_bounded

LARGEST = 1 << 28
"""Maximum bytes of a description; a million input files need less."""


@dataclass(frozen=True)
class SourceFile:
    """An input file of a dataset."""

    path: str
    """Path as given."""
    bytes: int
    """Size on disk."""
    documents: int = 0
    """Documents read from it."""
    tokens: int = 0
    """Their tokens, EOD included."""


@dataclass(frozen=True)
class Conversations:
    """What a dataset of conversations says more; its `.mask` marks the tokens that are learnt."""

    template: str
    """Name of the chat template: alpaca, chatml, tokenizer, or a file."""
    template_text: str
    """The template itself."""
    bos: str
    """What it writes for bos_token."""
    eos: str
    """What it writes for eos_token."""
    answers: int
    """Messages of the assistant."""
    targets: int
    """Tokens that are learnt: those of answers, with the tokens that end them."""
    end_id: int
    """The token that ends most answers."""


@dataclass(frozen=True)
class DatasetMeta:
    """Contents of `<prefix>.json`."""

    tokenizer: str
    """Tokenizer file or folder as given, or "bytes"."""
    tokenizer_kind: str
    """huggingface, sentencepiece or bytes."""
    tokenizer_fingerprint: str
    """sha256 of the tokenizer's canonical content."""
    vocab_size: int
    """Largest id that the tokenizer can produce, plus one."""
    eod_id: int | None
    """Id that ends every document; None: documents have no end token."""
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
    """Documents skipped, by reason."""
    special_tokens: dict[str, int] = field(default_factory=dict)
    """The tokenizer's special tokens and their ids, by id; empty if an earlier version wrote the description."""
    special_spellings: Literal["text", "token"] | None = None
    """How special tokens that are spelled out in texts were encoded: as text, or as the token, so that an EOD may occur
    in the middle of a document.  None if an earlier version wrote the description; its rule was token."""
    spelled: dict[str, int] = field(default_factory=dict)
    """How often each of them is spelled out in the texts."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of the .bin, .idx and .mask files, by suffix; empty if an earlier version wrote the description."""
    conversations: Conversations | None = None
    """Of a dataset of conversations; None: its documents are texts."""
    format: Literal["megaponder-dataset-1"] = "megaponder-dataset-1"
    """Version of this file."""

    def dump(self) -> bytes:
        """Readable JSON, the same bytes for the same dataset."""
        values = asdict(self)
        if self.conversations is None:
            del values["conversations"]
        return orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def spellings(meta: DatasetMeta) -> str:
    """A line about the special tokens that are spelled out in the texts of a dataset."""
    found = ", ".join(f"{token} {count:,}" for token, count in meta.spelled.items())
    became = "encoded as text" if meta.special_spellings == "text" else "which became the tokens"
    return f"special tokens spelled out in texts: {found}; {became}"


def learnt(meta: DatasetMeta) -> str:
    """A line about what is learnt of a dataset of conversations."""
    told = meta.conversations
    assert told is not None
    share = f"{told.targets:,} of {meta.tokens:,} tokens ({told.targets / meta.tokens:.1%})"
    return f"conversations by template {told.template}: {told.answers:,} answers, of which {share} are learnt"


_ADAPTER = pydantic.TypeAdapter(DatasetMeta)


@dataclass(frozen=True)
class DatasetInfo:
    """An indexed dataset on disk."""

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
    """The JSON file beside it; None for datasets written by other tools."""


def _meta_from(content: bytes, path: str) -> DatasetMeta:
    try:
        return _ADAPTER.validate_json(content, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = f"{where}: {first['msg']}" if where else first["msg"]
        raise UserError(
            f"{path}: not a complete description of a dataset ({what}); prepare the dataset again."
        ) from None


def read_meta(index: Index) -> DatasetMeta | None:
    """The JSON file beside a dataset, checked against it; None if there is none.

    Raises UserError when it is damaged or belongs to other files.
    """
    path = index.prefix + ".json"
    if is_special(Path(path)):
        raise UserError(f"{path} is a pipe or a device; prepare or copy the dataset again.")
    if not os.path.isfile(path):
        return None
    meta = _meta_from(read_bounded(path, LARGEST), path)
    if not (-1 <= meta.max_id < meta.vocab_size and (meta.eod_id is None or 0 <= meta.eod_id < meta.vocab_size)):
        raise UserError(
            f"{path}: damaged (largest id {meta.max_id} or EOD {meta.eod_id} is not an id of a vocabulary of "
            f"{meta.vocab_size}); prepare the dataset again."
        )
    here = (index.documents, index.tokens, index.dtype.name)
    if here != (meta.documents, meta.tokens, meta.dtype) or index.bin_bytes != index.tokens * index.dtype.itemsize:
        raise UserError(
            f"{path}: describes {meta.documents} documents with {meta.tokens} {meta.dtype} tokens, but .bin/.idx hold "
            f"{here[0]} with {here[1]} {here[2]} in {index.bin_bytes} bytes; the files belong to different datasets."
        )
    if (meta.conversations is None) != (index.mask is None):
        there = "there is no such file, and" if index.mask is None else "this file belongs to another dataset:"
        holds = "texts" if meta.conversations is None else "conversations"
        raise UserError(f"{index.prefix}.mask: {there} {path} says that the dataset holds {holds}; prepare it again.")
    return meta


def inspect_dataset(prefix: str | os.PathLike[str]) -> DatasetInfo:
    """Describe the indexed dataset at `prefix` (path without .bin/.idx); UserError if it is missing or damaged."""
    index = read_index(prefix)
    lengths = index.lengths[:]
    return DatasetInfo(
        index.prefix,
        index.documents,
        index.sequences,
        index.tokens,
        index.dtype.name,
        index.bin_bytes,
        int(lengths.min()),
        int(lengths.max()),
        read_meta(index),
    )
