"""Input files as a stream of chunks of complete documents, starting at any position.

    .jsonl .json .txt       also as .gz and .zst (the Pile's own form; several frames in a file are one stream)
    .parquet                with the extra `parquet`

A `Position` is where a chunk ends; resuming there gives the same documents as an uninterrupted read.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import orjson

from megaponder.data.documents import Chunk, TxtRule
from megaponder.errors import ConfigError, UserError, first_line
from megaponder.files import is_special

KINDS = {".jsonl": "jsonl", ".json": "json", ".txt": "txt", ".parquet": "parquet"}
PACKED = (".gz", ".zst")
BLOCK = 1 << 20
CHUNK_BYTES = 1 << 20
MIB = 1 << 20
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Limits:
    """How much memory an input may require."""

    document: int = 256 * MIB
    """Bytes of a document, decompressed: it is held in memory as text and as tokens."""
    window: int = 128 * MIB
    """Bytes of the window that a .zst file may require; the default is that of the zstd program."""


@dataclass(frozen=True)
class Position:
    """Where the next document starts."""

    file: int = 0
    offset: int = 0
    """Bytes of the decompressed file (rows of parquet, items of a .json list) before it."""
    line: int = 1
    """Its line (or row) number, from 1."""


@dataclass(frozen=True)
class Read:
    """A chunk, where it ends, and how much of its file on disk has been read (for progress)."""

    chunk: Chunk
    end: Position
    disk_bytes: int


def kind_of(path: Path) -> str | None:
    """jsonl, json, txt or parquet by name; None for other files."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in PACKED:
        kind = KINDS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if kind == "parquet" else kind
    return KINDS.get(path.suffix)


def list_inputs(inputs: Sequence[str]) -> list[Path]:
    """Files to read, in order; a folder stands for all files of a known format below it, sorted by path, except .json,
    which seldom are data.

    Raises UserError for a missing path, an unknown format, a folder without input files, or a duplicate file.
    """
    known = "known: .jsonl, .json and .txt, also as .gz or .zst, and .parquet"
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and kind_of(p) not in (None, "json"))
            if not found:
                raise UserError(f"{name}: this folder contains no input file ({known}).")
            files += found
        elif is_special(path):
            raise UserError(f"{name} is a pipe or a device; inputs must be files, since they are read several times.")
        elif not path.is_file():
            raise UserError(f"{name}: no such file or folder.")
        elif kind_of(path) is None:
            raise UserError(f"{name}: the file name does not tell its format ({known}).")
        else:
            files.append(path)
    seen: set[str] = set()
    for path in files:
        real = os.path.realpath(path)
        if real in seen:
            raise UserError(f"{path}: this input is named twice, so its documents would be in the dataset twice.")
        seen.add(real)
    if not files:
        raise ConfigError("input", [], "there is nothing to read", "name at least one file or folder")
    return files


ZSTD_BLOCK = 1 << 12
"""Compressed bytes that are decompressed at a time.  Four of them may expand to 128 KiB, so this many to 128 MiB."""


def _unzstd(stream: IO[bytes], path: Path, limits: Limits) -> Iterator[bytes]:
    import zstandard

    # The library's stream reader accepts a file that ends inside a frame as complete: check the frames here.
    decoder = None
    while block := stream.read(ZSTD_BLOCK):
        while block:
            if decoder is None:
                decoder = zstandard.ZstdDecompressor(max_window_size=limits.window).decompressobj()
            try:
                yield decoder.decompress(block)
            except zstandard.ZstdError as error:
                if "too much memory" in str(error):
                    raise UserError(
                        f"{path}: decompressing it needs a window of more than {limits.window // MIB} MiB; allow "
                        "more with --zstd-window MIB (at most 2048), which uses as much memory."
                    ) from error
                raise UserError(f"{path}: not valid zstd data near byte {stream.tell()} ({error}).") from error
            block = decoder.unused_data if decoder.eof else b""
            if decoder.eof:
                decoder = None
    if decoder is not None:
        raise UserError(f"{path}: truncated, the file ends inside a zstd frame; copy or download it again.")


def _ungzip(stream: IO[bytes], path: Path, limits: Limits) -> Iterator[bytes]:
    try:
        with gzip.open(stream) as unpacked:
            while block := unpacked.read(BLOCK):
                yield block
    except EOFError as error:
        raise UserError(f"{path}: truncated gzip file; copy or download it again.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: not valid gzip data ({error}).") from error


def _blocks(path: Path, stream: IO[bytes], skip: int, limits: Limits) -> Iterator[bytes]:
    """Decompressed content from byte `skip`."""
    if path.suffix not in PACKED:
        stream.seek(skip)
        while block := stream.read(BLOCK):
            yield block
        return
    for block in (_unzstd if path.suffix == ".zst" else _ungzip)(stream, path, limits):
        if skip < len(block):
            yield block[skip:]
        skip = max(0, skip - len(block))


def _pieces(blocks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of at most `size` (a compressed block may expand to far more)."""
    for block in blocks:
        for at in range(0, len(block), size):
            yield block[at : at + size]


def _last_edge(data: bytes, rule: TxtRule | None) -> int:
    """Where `data`, which may be incomplete, can be cut between two documents; 0 if nowhere."""
    if rule is None or rule.split == "line":
        return data.rfind(b"\n") + 1
    edge = rule.edge
    if edge is None:
        return 0
    # A separator at the end may continue in the next block; one followed by a space may be part of a longer one.
    cuts = [m.end() for m in edge.finditer(data) if m.end() < len(data) and data[m.end()] not in b" \t\r\n"]
    return cuts[-1] if cuts else 0


def _read_lines(path: Path, start: Position, rule: TxtRule | None, limits: Limits, chunk_bytes: int) -> Iterator[Read]:
    whole = rule is not None and rule.edge is None
    with open(path, "rb") as stream:
        waiting, size, at, target = [], 0, start, chunk_bytes
        for block in _pieces(_blocks(path, stream, start.offset, limits), chunk_bytes):
            waiting.append(block)
            size += len(block)
            too_large = size > limits.document
            if too_large and whole:
                raise UserError(
                    f"{path}: larger than {limits.document // MIB} MiB, too large for one document; set what a "
                    f"document is with --txt-split line, --txt-split blank or a separator line."
                )
            if whole or (size < target and not too_large):
                continue
            data = b"".join(waiting)
            cut = _last_edge(data, rule)
            if too_large and not cut:
                raise _too_large(path, at.line, limits)
            waiting, size = [data[cut:]], len(data) - cut
            target = (
                chunk_bytes if cut else 2 * size
            )  # so that a long document is not joined and searched at every block
            if cut:
                read = _cut(data[:cut], at, stream.tell())
                at = read.end
                yield read
        if size:
            yield _cut(b"".join(waiting), at, stream.tell())


def _too_large(path: Path, line: int, limits: Limits) -> UserError:
    return UserError(
        f"{path}:{line}: the document that starts here is larger than {limits.document // MIB} MiB; remove it, or "
        "allow more with --max-document MIB, which uses several times as much memory."
    )


def _cut(data: bytes, at: Position, disk_bytes: int) -> Read:
    end = replace(at, offset=at.offset + len(data), line=at.line + data.count(b"\n"))
    if at.offset == 0:
        data = data.removeprefix(BOM)
    return Read(Chunk(at.file, at.line, data), end, disk_bytes)


def _read_json(path: Path, start: Position, limits: Limits, chunk_bytes: int) -> Iterator[Read]:
    """The items of a list; a file that is no list has JSON lines."""
    with open(path, "rb") as stream:
        blocks = _blocks(path, stream, 0, limits)
        data = next(blocks, b"").removeprefix(BOM)
        if not data.lstrip().startswith(b"["):
            yield from _read_lines(path, start, None, limits, chunk_bytes)
            return
        for block in blocks:
            data += block
            if len(data) > limits.document:
                raise UserError(
                    f"{path}: a list of more than {limits.document // MIB} MiB, which is read at once; write its items "
                    "as lines of a .jsonl file, or allow more with --max-document MIB."
                )
    try:
        items = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error}).") from None
    rows: list[bytes] = []
    size = 0
    for number, item in enumerate(items[start.offset :], start.offset + 1):
        rows.append(orjson.dumps(item))
        size += len(rows[-1])
        if size >= chunk_bytes or number == len(items):
            chunk = Chunk(start.file, number + 1 - len(rows), rows=tuple(rows))
            disk = path.stat().st_size * number // len(items)
            yield Read(chunk, Position(start.file, number, number + 1), disk)
            rows, size = [], 0


def _read_parquet(path: Path, start: Position, field: str, limits: Limits) -> Iterator[Read]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f'{path}: reading .parquet needs pyarrow; install it with pip install "megaponder[parquet]".'
        ) from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({error}).") from error
    names = table.schema_arrow.names
    if field not in names:
        raise UserError(f"{path}: no column {field!r} (columns: {', '.join(names)}); name it with --field.")
    kind = table.schema_arrow.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_binary(kind)):
        raise UserError(f"{path}: column {field!r} has type {kind}, not string; choose another one with --field.")
    total, disk, seen = max(1, table.metadata.num_rows), path.stat().st_size, 0
    try:
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            seen += len(batch)
            if seen <= start.offset:
                continue
            begin = max(start.offset, seen - len(batch))
            rows = batch.column(0).slice(begin - (seen - len(batch))).cast(pyarrow.large_binary()).to_pylist()
            if any(row is not None and len(row) > limits.document for row in rows):
                raise _too_large(path, begin + 1, limits)
            end = Position(start.file, seen, seen + 1)
            yield Read(Chunk(start.file, begin + 1, rows=tuple(rows)), end, disk * seen // total)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged, or too large for memory, after row {seen} ({first_line(error)}).") from error


def read_chunks(
    files: Sequence[Path],
    start: Position,
    field: str,
    rule: TxtRule,
    chunk_bytes: int = CHUNK_BYTES,
    limits: Limits = Limits(),
) -> Iterator[Read]:
    """Chunks of `files` from `start`, in order.  UserError for a file that is damaged or exceeds the limits."""
    for number in range(start.file, len(files)):
        at = start if number == start.file else Position(number)
        kind = kind_of(files[number])
        if kind == "parquet":
            yield from _read_parquet(files[number], at, field, limits)
        elif kind == "json":
            yield from _read_json(files[number], at, limits, chunk_bytes)
        else:
            yield from _read_lines(files[number], at, rule if kind == "txt" else None, limits, chunk_bytes)
