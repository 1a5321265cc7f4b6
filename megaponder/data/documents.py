"""From a chunk of raw input to documents, with the policy for documents that cannot be read.

A document is one line of .jsonl or one item of a .json list (its text field, or the whole as a record), one row of
.parquet, or part of a .txt file as set by `TxtRule`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

REASONS = (
    "empty", "invalid_utf8", "invalid_json", "bad_field", "no_answer", "unknown_role", "template", "special_token",
)  # fmt: skip
"""Why a document may be skipped."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive complete documents, as read."""

    file: int
    """Number of the input file."""
    first: int
    """Number of the first line (or parquet row), from 1."""
    data: bytes = b""
    """Raw lines (all formats but parquet)."""
    rows: tuple[bytes | None, ...] | None = None
    """Text column of parquet rows, or items of a .json list, each as JSON."""


@dataclass(frozen=True)
class Problem:
    """A document that cannot be read."""

    line: int
    """Line (or row) of the file, from 1."""
    reason: str
    """One of REASONS."""
    message: str
    """What is wrong, in words."""


@dataclass(frozen=True)
class TxtRule:
    """What a document is in a .txt file."""

    split: str = "file"
    """file: the whole file; line: each line; blank: parts between blank lines; else: between lines that equal this."""

    @property
    def edge(self) -> re.Pattern[bytes] | None:
        """Pattern of the separator between documents; None if the file is one document."""
        if self.split == "file":
            return None
        if self.split == "line":
            return re.compile(rb"\r?\n")
        if self.split == "blank":
            return re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")
        return re.compile(rb"(?:^|\r?\n|(?<=\n))" + re.escape(self.split.encode()) + rb"\r?(?:\n|\Z)")


def _utf8_problem(data: bytes, line: int) -> Problem | None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        at = line + data.count(b"\n", 0, error.start)
        return Problem(at, "invalid_utf8", f"byte 0x{data[error.start]:02x} is not valid UTF-8")
    return None


def _json_text(record: Any, number: int, field: str) -> str | Problem:
    if isinstance(record, Problem):
        return record
    if not isinstance(record, dict):
        return Problem(number, "bad_field", f"the line is {_kind(record)}, not an object with a text field")
    text = record.get(field)
    if isinstance(text, str):
        return text
    if field not in record:
        keys = ", ".join(sorted(record)[:10]) or "none"
        return Problem(number, "bad_field", f"no field {field!r} (fields: {keys}); name it with --field")
    return Problem(number, "bad_field", f"field {field!r} is {_kind(text)}, not a string")


def _kind(value: object) -> str:
    """What JSON calls a value."""
    kinds = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


def records(chunk: Chunk) -> Iterator[tuple[int, Any]]:
    """(line, what its JSON says or Problem) of each line of .jsonl, or item of a .json list, in `chunk`."""
    lines = chunk.data.split(b"\n") if chunk.rows is None else chunk.rows
    for number, line in enumerate(lines, chunk.first):
        if line is None or not line.strip():  # a blank line is not a document
            continue
        try:
            yield number, orjson.loads(line)
        except orjson.JSONDecodeError as error:
            problem = _utf8_problem(line, number)
            yield number, problem or Problem(number, "invalid_json", f"not valid JSON ({error})")


def _decoded(data: bytes, line: int) -> str | Problem:
    return _utf8_problem(data, line) or data.decode()


def _txt(chunk: Chunk, rule: TxtRule) -> Iterator[tuple[int, str | Problem]]:
    edge, at, line = rule.edge, 0, chunk.first
    edges = [match.span() for match in edge.finditer(chunk.data)] if edge else []
    for begin, end in [*edges, (len(chunk.data), len(chunk.data))]:
        part = chunk.data[at:begin]
        if part.strip():
            yield line, _decoded(part, line)
        line += chunk.data.count(b"\n", at, end)
        at = end


def _parquet(chunk: Chunk) -> Iterator[tuple[int, str | Problem]]:
    for row, value in enumerate(chunk.rows or (), chunk.first):
        yield row, Problem(row, "bad_field", "the text is null") if value is None else _decoded(value, row)


def documents(chunk: Chunk, kind: str, field: str, rule: TxtRule) -> Iterator[tuple[int, str | Problem]]:
    """(line, text or Problem) of each document of `chunk`; kind: jsonl, json, txt or parquet."""
    if kind in ("jsonl", "json"):
        return ((number, _json_text(record, number, field)) for number, record in records(chunk))
    return _txt(chunk, rule) if kind == "txt" else _parquet(chunk)
