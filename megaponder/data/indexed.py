"""The .bin/.idx pair of Megatron-family indexed datasets, read and written with numpy only.

    .bin  token ids of all sequences, one after the other
    .idx  magic(9) version(u64) dtype code(u8) sequences S(u64) document edges D(u64)
          lengths int32[S], byte offsets int64[S], document edges int64[D] (0 ... S), optionally modes int8[S]

Conversations have a third file, .mask: a byte for each token, 1 if it is learnt.

This module checks and writes the pair, without torch; training reads it with `TokenReader`.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaponder import files
from megaponder.data.checked import CheckedArray, CheckedFile
from megaponder.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CODES = {name: code for code, name in DTYPES.items()}
_BLOCK = 1 << 20  # entries held in memory
_CHECKED_BLOCKS = 64  # of an index that is opened for training; `inspect --audit` reads all of a dataset


def best_dtype(vocab_size: int) -> str:
    """Type of the ids on disk: megatron-core's own rule, for compatibility."""
    return "uint16" if vocab_size < 65500 else "int32"


@dataclass(frozen=True)
class Index:
    """The contents of an .idx file, and both files, which stay open as long as this object lives."""

    prefix: str
    dtype: np.dtype
    lengths: CheckedArray
    """int32 [S]: tokens in each sequence."""
    offsets: CheckedArray
    """int64 [S]: byte offset of each sequence in the .bin file."""
    edges: CheckedArray
    """int64 [D]: the first sequence of each document, and S (a document of other tools may hold several sequences)."""
    ids: CheckedArray
    """[tokens]: the contents of the .bin file."""
    mask: CheckedArray | None = None
    """int8 [tokens], of conversations: 1 for a token that is learnt, else 0."""

    @property
    def tokens(self) -> int:
        """Tokens in the .bin file."""
        return len(self.ids)

    @property
    def bin_bytes(self) -> int:
        """Size of the .bin file."""
        return self.ids.file.size

    @property
    def documents(self) -> int:
        """Documents in the dataset."""
        return int(self.edges.shape[0]) - 1

    @property
    def sequences(self) -> int:
        """Sequences S: the unit of a dataset's splits."""
        return int(self.lengths.shape[0])

    def path(self, suffix: str) -> Path:
        """One of its files."""
        return Path(self.prefix + suffix)

    def tokens_in(self, begin: int, end: int) -> int:
        """Tokens of sequences begin <= i < end."""
        if end <= begin:
            return 0
        last = end - 1
        return (int(self.offsets[last]) - int(self.offsets[begin])) // self.dtype.itemsize + int(self.lengths[last])

    def fingerprint(self) -> str:
        """Hash that changes with the sequences' lengths, computed from sizes and 64 blocks of the cumulative offsets.

        Index caches are named by it, so a dataset rewritten under an old name never finds an old cache.
        """
        digest = hashlib.sha256(f"{self.dtype}:{self.sequences}:{self.tokens}".encode())
        for begin in np.linspace(0, max(0, self.sequences - 1), 64).astype(int):
            digest.update(self.offsets[begin : begin + 1024].tobytes())
        return digest.hexdigest()

    def max_id(self, scan_tokens: int = 1 << 24, windows: int = 64) -> int:
        """Largest token id: of all tokens if there are few, otherwise of evenly spread windows."""
        ids = self.ids
        if len(ids) <= scan_tokens:
            return int(ids[:].max()) if len(ids) else -1
        width = scan_tokens // windows
        return max(int(ids[at : at + width].max()) for at in np.linspace(0, len(ids) - width, windows).astype(int))


_PAIR = struct.Struct("<2q")


class TokenReader:
    """Sequences of a dataset by number; replaces megatron-core's IndexedDataset, which maps files into memory."""

    def __init__(self, index: Index):
        self.index, self.path_prefix = index, index.prefix

    @property
    def sequence_lengths(self) -> np.ndarray:
        """int32 [S], read on each call: only building an order needs it."""
        return self.index.lengths[:]

    def text(self, numbers: Sequence[int], begin: int, end: int) -> np.ndarray:
        """Tokens of these consecutive sequences, int64: from token `begin` of the first up to token `end` of the
        last."""
        index, size, last = self.index, self.index.dtype.itemsize, len(numbers) - 1
        file, offsets, parts = index.ids.file, index.offsets, []
        for i, number in enumerate(numbers):
            at, after = self._span(offsets, number)
            first = at + begin * size if i == 0 else at
            stop = at + end * size if i == last else after
            parts.append(file.read(first, stop - first))
        return np.frombuffer(b"".join(parts), index.dtype).astype(np.int64)

    def _span(self, offsets: CheckedArray, number: int) -> tuple[int, int]:
        """Byte offsets of a sequence and of the next one."""
        place = offsets.offset + 8 * number
        if number + 1 == len(offsets):
            return int(offsets[number]), len(self.index.ids) * self.index.dtype.itemsize
        begin, end = _PAIR.unpack(offsets.file.read(place, 16))
        return begin, end


def _damaged(path: str, what: str) -> UserError:
    return UserError(f"{path}: {what}; prepare or copy the dataset again.")


def _is_there(path: str) -> bool:
    """Whether the file exists; other reasons why it cannot be read raise OSError."""
    try:
        with open(path, "rb"):
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_index(prefix: str | os.PathLike[str]) -> Index:
    """Read and check `<prefix>.idx` against `<prefix>.bin`.

    Raises UserError that names the file for a missing, foreign or truncated one.
    """
    prefix = os.fspath(prefix)
    idx, bin_ = prefix + ".idx", prefix + ".bin"
    for path in (idx, bin_):
        if files.is_special(Path(path)):
            raise UserError(f"{path} is a pipe or a device; `megaponder prepare` writes datasets as files.")
        if not _is_there(path):
            near = sorted(p.stem for p in Path(path).parent.glob("*.idx"))[:5]
            hint = f"datasets in that folder: {', '.join(near)}" if near else "that folder contains no dataset"
            raise UserError(f"{path}: no such file ({hint}); give the path of a dataset without .bin/.idx.")
    index_file, token_file = CheckedFile(idx), CheckedFile(bin_)
    idx_bytes, bin_bytes = index_file.size, token_file.size
    head = index_file.read(0, min(HEADER.size, idx_bytes))
    if not head.startswith(MAGIC):
        if head.startswith(b"TNTIDX"):
            raise UserError(f"{idx}: written in Megatron's old lazy/cached format; prepare it again.")
        raise _damaged(idx, "not the index of an indexed dataset")
    if len(head) < HEADER.size:
        raise _damaged(idx, f"truncated ({idx_bytes} bytes, the header alone has {HEADER.size})")
    _, version, code, sequences, edges = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        raise _damaged(idx, f"format version {version} with number type {code} is not a known format of token data")
    need = HEADER.size + 12 * sequences + 8 * edges
    if idx_bytes not in (need, need + sequences):  # the second: one mode byte a sequence
        raise _damaged(idx, f"truncated or damaged ({idx_bytes} bytes, its header requires {need})")
    if sequences == 0 or edges < 2:
        raise _damaged(idx, "the dataset has no documents")
    lengths = CheckedArray(index_file, np.int32, HEADER.size, (sequences,))
    offsets = CheckedArray(index_file, np.int64, HEADER.size + 4 * sequences, (sequences,))
    dtype = np.dtype(DTYPES[code])
    end = int(offsets[-1]) + int(lengths[-1]) * dtype.itemsize
    if bin_bytes < end:
        raise _damaged(bin_, f"truncated ({bin_bytes} bytes, its index requires {end})")
    document_edges = CheckedArray(index_file, np.int64, HEADER.size + 12 * sequences, (edges,))
    ids = CheckedArray(token_file, dtype, 0, (max(0, end) // dtype.itemsize,))
    index = Index(prefix, dtype, lengths, offsets, document_edges, ids, _mask(prefix, len(ids)))
    _check_entries(index)
    return index


def _mask(prefix: str, tokens: int) -> CheckedArray | None:
    if not _is_there(prefix + ".mask"):
        return None
    file = CheckedFile(prefix + ".mask")
    if file.size != tokens:
        raise _damaged(file.path, f"it marks {file.size:,} tokens of a dataset of {tokens:,}")
    return CheckedArray(file, np.int8, 0, (tokens,))


def _blocks(count: int, most: int) -> Iterator[slice]:
    """All entries in blocks; if that takes more than `most`, evenly spread blocks including the first and the last."""
    starts = list(range(0, count, _BLOCK))
    if len(starts) > most:
        starts = np.linspace(0, count - _BLOCK, most).astype(int).tolist()
    for at in starts:
        yield slice(at, min(at + _BLOCK + 1, count))  # one more, to compare with the next block


def check_all(index: Index) -> None:
    """Read every entry of an index.  UserError if one is wrong."""
    _check_entries(index, len(index.lengths))


def _check_entries(index: Index, most: int = _CHECKED_BLOCKS) -> None:
    """Each sequence must start where the previous one ends, and documents must divide them in order."""
    idx, lengths, offsets, itemsize = index.prefix + ".idx", index.lengths, index.offsets, index.dtype.itemsize
    if int(offsets[0]) != 0:
        raise _damaged(idx, f"damaged (sequence 0 starts at byte {int(offsets[0])})")
    for part in _blocks(len(lengths), most):
        some, begins = lengths[part], offsets[part]
        wrong = np.flatnonzero((some[:-1] < 0) | (np.diff(begins) != some[:-1].astype(np.int64) * itemsize))
        if len(wrong):
            raise _damaged(
                idx, f"damaged (sequence {part.start + int(wrong[0])} does not end where the next one starts)"
            )
    if int(lengths[-1]) < 0:
        raise _damaged(idx, f"damaged (the last sequence has {int(lengths[-1])} tokens)")
    edges, sequences = index.edges, index.sequences
    if int(edges[0]) != 0 or int(edges[-1]) != sequences:
        raise _damaged(idx, f"damaged (documents {int(edges[0])} to {int(edges[-1])} of {sequences} sequences)")
    for part in _blocks(len(edges), most):
        if np.any(np.diff(edges[part]) < 0):
            raise _damaged(idx, "damaged (its documents are not in order)")


def write_index(path: str | os.PathLike[str], dtype: str, lengths: np.ndarray) -> None:
    """Write an .idx for documents of `lengths` (int32 [S], one sequence each); fsynced, memory bounded."""
    count, itemsize = int(lengths.shape[0]), np.dtype(dtype).itemsize
    with open(path, "wb") as out:
        out.write(HEADER.pack(MAGIC, 1, _CODES[dtype], count, count + 1))
        for at in range(0, count, _BLOCK):
            out.write(lengths[at : at + _BLOCK].astype("<i4").tobytes())
        position = 0
        for at in range(0, count, _BLOCK):
            sizes = lengths[at : at + _BLOCK].astype(np.int64) * itemsize
            ends = position + np.cumsum(sizes)
            out.write((ends - sizes).astype("<i8").tobytes())
            position = int(ends[-1])
        for at in range(0, count + 1, _BLOCK):
            out.write(np.arange(at, min(at + _BLOCK, count + 1), dtype="<i8").tobytes())
        out.flush()
        os.fsync(out.fileno())
