"""What distinguishes a dataset from another one under the same name, and regions of it that were never written.

An identity is cheap enough to compute for every dataset at every start: the sizes of both files, the CRC-32 of the
index, a hash of evenly spread windows of the tokens, and the tokenizer.  Bytes changed in place between the
windows go unnoticed: `megaponder inspect --audit` reads all of a dataset.
"""

from __future__ import annotations

import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields

from megaponder.data.checked import CheckedFile
from megaponder.data.indexed import Index
from megaponder.data.info import DatasetMeta
from megaponder.errors import UserError
from megaponder.files import WINDOW, windows

_BLOCK = 1 << 24
_THREADS = 16  # storage serves many requests at a time
Stored = dict[str, str | int | None]
"""An `Identity` as plain data."""
_WORDS = {
    "bin_bytes": "size of .bin", "idx_bytes": "size of .idx", "idx_crc": "CRC-32 of .idx",
    "samples": "hash of sampled tokens", "tokenizer": "tokenizer", "mask_crc": "CRC-32 of .mask",
}  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """Equal for equal datasets, wherever they are stored."""

    bin_bytes: int
    idx_bytes: int
    idx_crc: int
    samples: str
    """Hash of the windows."""
    tokenizer: str | None
    """Its fingerprint; None if the dataset has no description."""
    mask_crc: int | None = None
    """Of the marks of what is learnt; None if the dataset has none."""

    def stored(self) -> Stored:
        """As plain data, for JSON."""
        return asdict(self)

    def difference(self, other: Stored) -> str | None:
        """The difference from another identity, in words (this one's value first); None if there is none."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), other.get(f.name)
            if mine != theirs:
                return f"its {_WORDS[f.name]} is {_short(mine)}, not {_short(theirs)}"
        return None


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else "unknown"


def identify(index: Index, meta: DatasetMeta | None) -> Identity:
    """The identity of an opened dataset.  UserError if its files cannot be read to the end."""
    digest = hashlib.sha256()
    for at in windows(index.bin_bytes):
        digest.update(index.ids.file.read(at, min(WINDOW, index.bin_bytes - at)))
    idx = index.lengths.file
    tokenizer = meta.tokenizer_fingerprint if meta else None
    mask = None if index.mask is None else _crc(index.mask.file)
    return Identity(index.bin_bytes, idx.size, _crc(idx), digest.hexdigest(), tokenizer, mask)


def identify_all(opened: dict[str, tuple[Index, DatasetMeta | None]]) -> dict[str, Identity]:
    """`identify` of each of many datasets."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(opened, pool.map(lambda one: identify(*one), opened.values()), strict=True))


def different(mine: dict[str, Stored], theirs: dict[str, Stored]) -> tuple[str, str] | None:
    """The first dataset whose stored identities differ, and how; None if all are equal."""
    for path, stored in mine.items():
        what = Identity(**stored).difference(theirs.get(path, {}))  # type: ignore[arg-type]
        if what:
            return path, what
    return None


def _crc(file: CheckedFile) -> int:
    value = 0
    for at in range(0, file.size, _BLOCK):
        value = zlib.crc32(file.read(at, min(_BLOCK, file.size - at)), value)
    return value


def unwritten(index: Index) -> str | None:
    """Words about a region of the .bin file that was never written, or is all zero; None if none is found.

    If the file system reports holes, all of them are found; otherwise a sampled window must hit the region.
    """
    file, end = index.ids.file, index.tokens * index.dtype.itemsize
    hole = file.hole(end)
    if hole is not None and hole[1] - hole[0] >= WINDOW:
        return f"bytes {hole[0]:,} to {hole[1]:,} were never written (a hole in the file)"
    for at in windows(end):
        if at + WINDOW <= end and not any(file.read(at, WINDOW)):
            return f"bytes {at:,} to {at + WINDOW:,} are all zero"
    return None


def refuse_unwritten(prefix: str, index: Index) -> None:
    """UserError for a dataset with a region that was never written."""
    if what := unwritten(index):
        raise UserError(
            f"{prefix}.bin: {what}, as in a file that was copied incompletely; copy or prepare it again, or, if so "
            f"many consecutive tokens of id 0 are intended, accept them with data.accept_zeros: [{prefix}]."
        )
