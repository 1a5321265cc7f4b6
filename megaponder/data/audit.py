"""What can only be learnt about a dataset by reading all of it: checksums, duplicates, the longest documents."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megaponder import files
from megaponder.data.indexed import Index, check_all, read_index
from megaponder.data.info import DatasetMeta, read_meta
from megaponder.errors import UserError
from megaponder.files import WINDOW

_BLOCK_TOKENS = 1 << 22
LONGEST = 3
"""Number of documents that an audit lists."""


@dataclass
class Audit:
    """One dataset, read from the first token to the last."""

    prefix: str
    documents: int
    tokens: int
    empty: int
    """Sequences without tokens."""
    longest: list[tuple[int, int]]
    """(tokens, number) of the longest sequences."""
    max_id: int
    """Largest token id found."""
    verified: bool
    """The checksums in its description were compared; False if it has none."""
    duplicates: int = 0
    """Sequences whose tokens equal those of an earlier sequence, in this dataset or in one audited before it."""
    duplicate_tokens: int = 0
    """Their tokens."""
    inner_eods: int = 0
    """EOD tokens before the end of their sequence."""
    zeros: int = 0
    """Tokens in blocks of `files.WINDOW` bytes that are all zero, as in a region that was never written."""
    first_zero: int | None = None
    """The first of them."""
    meta: DatasetMeta | None = None
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64), repr=False)
    """uint64 [S]: of each sequence's tokens (64 bits of BLAKE2b)."""


def audit(prefixes: Sequence[str], on_progress: Callable[[int, int], None] | None = None) -> list[Audit]:
    """Read datasets from end to end; `on_progress` gets the tokens read and the tokens in all.

    Raises UserError for damage: a checksum that differs, an index out of order, an id beyond the vocabulary.
    """
    opened = [read_index(prefix) for prefix in prefixes]
    described = [read_meta(index) for index in opened]
    total = sum(index.tokens for index in opened)
    found: list[Audit] = []
    for index, meta in zip(opened, described, strict=True):
        before = sum(one.tokens for one in found)
        found.append(_read(index, meta, before, total, on_progress or (lambda done, total: None)))
    _count_duplicates(found, opened)
    return found


def _read(
    index: Index, meta: DatasetMeta | None, before: int, total: int, on_progress: Callable[[int, int], None]
) -> Audit:
    check_all(index)
    all_lengths, offsets = index.lengths[:], index.offsets[:]
    hashes, crc, max_id, at = np.empty(index.sequences, np.uint64), 0, -1, 0
    eod, eods, zeros = meta.eod_id if meta else None, 0, _Zeros(index.dtype.itemsize)
    while at < index.sequences:
        limit = int(offsets[at]) + _BLOCK_TOKENS * index.dtype.itemsize
        end = max(at + 1, int(np.searchsorted(offsets, limit)))
        begin, lengths = int(offsets[at]) // index.dtype.itemsize, all_lengths[at:end]
        block = index.ids[begin : begin + int(lengths.sum(dtype=np.int64))]
        data = block.tobytes()
        crc = zlib.crc32(data, crc)
        max_id = max(max_id, int(block.max())) if len(block) else max_id
        if eod is not None:
            ends = np.cumsum(lengths, dtype=np.int64)[lengths > 0] - 1
            eods += int(np.count_nonzero(block == eod)) - int(np.count_nonzero(block[ends] == eod))
        zeros.add(block)
        _hash(data, lengths * index.dtype.itemsize, hashes[at:end])
        on_progress(before + begin + len(block), total)
        at = end
    _compare(index, meta, crc, max_id)
    order = np.argsort(all_lengths, kind="stable")[::-1][:LONGEST]
    return Audit(
        index.prefix,
        index.documents,
        index.tokens,
        int(np.sum(all_lengths == 0)),
        [(int(all_lengths[i]), int(i)) for i in order],
        max_id,
        meta is not None and bool(meta.checksums),
        inner_eods=eods,
        zeros=zeros.tokens,
        first_zero=zeros.first,
        meta=meta,
        hashes=hashes,
    )


class _Zeros:
    """Counts tokens in windows of zeros; the windows are those of `identity.unwritten`."""

    def __init__(self, itemsize: int):
        self._width = WINDOW // itemsize
        self._rest, self._seen = np.empty(0), 0
        self.tokens = 0
        self.first: int | None = None

    def add(self, block: np.ndarray) -> None:
        """The next tokens."""
        if len(self._rest) > 0:
            lacking = self._width - len(self._rest)
            begun, block = np.concatenate([self._rest, block[:lacking]]), block[lacking:]
            if len(begun) < self._width:
                self._rest = begun
                return
            self._count(begun)
        whole = len(block) // self._width * self._width
        self._count(block[:whole])
        self._rest = block[whole:].copy()

    def _count(self, tokens: np.ndarray) -> None:
        empty = np.flatnonzero(~tokens.reshape(-1, self._width).any(axis=1))
        if len(empty):
            self.tokens += len(empty) * self._width
            self.first = self._seen + int(empty[0]) * self._width if self.first is None else self.first
        self._seen += len(tokens)


def _hash(data: bytes, sizes: np.ndarray, into: np.ndarray) -> None:
    at, view = 0, memoryview(data)
    for number, size in enumerate(sizes.tolist()):
        digest = hashlib.blake2b(view[at : at + size], digest_size=8).digest()
        into[number] = int.from_bytes(digest, "little")
        at += size


def _compare(index: Index, meta: DatasetMeta | None, crc: int, max_id: int) -> None:
    if meta is None:
        return
    wanted = meta.checksums
    found = {".bin": crc} | {s: files.checksum(index.path(s)) for s in (".idx", ".mask") if s in wanted}
    for suffix, here in found.items():
        if wanted and wanted.get(suffix) != here:
            raise UserError(
                f"{index.prefix}{suffix}: changed after it was written (its CRC-32 differs); copy or prepare it again."
            )
    if max_id != meta.max_id:
        raise UserError(
            f"{index.prefix}.bin: its largest token id is {max_id}, but its description says {meta.max_id}; copy or "
            f"prepare it again."
        )


def _count_duplicates(found: list[Audit], opened: list[Index]) -> None:
    """Every sequence except the first with its tokens is a duplicate; empty ones are not counted."""
    lengths = np.concatenate([index.lengths[:] for index in opened])
    hashes = np.concatenate([one.hashes for one in found])
    _, first = np.unique(hashes, return_index=True)
    repeated = np.ones(len(hashes), bool)
    repeated[first] = False
    repeated &= lengths > 0
    at = 0
    for one, index in zip(found, opened, strict=True):
        here = repeated[at : at + index.sequences]
        one.duplicates, one.duplicate_tokens = int(here.sum()), int(lengths[at : at + index.sequences][here].sum())
        at += index.sequences
