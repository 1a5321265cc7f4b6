"""The text of a study: part of a corpus folder, one BPE tokenizer, indexed datasets; made once for a choice of text.

A corpus folder holds train.jsonl and heldout.jsonl (or train*.jsonl: several files in order), plain or packed as .gz,
.zst or .xz.  A line has `text`, and may have `source` and `cat`: the kind of text by which held-out losses are told.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from megaponder.data.documents import TxtRule
from megaponder.data.indexed import read_index
from megaponder.data.info import read_meta
from megaponder.data.prepare import PrepareOptions, prepare
from megaponder.data.readers import Limits, Position, read_chunks
from megaponder.demo.tokenizer import train_tokenizer
from megaponder.errors import UserError

SUFFIXES = ("", ".gz", ".zst", ".xz")
WINDOW = Limits(window=2**31)
"""A corpus packed with the largest window that zstd has is read, too."""
TOKENIZER_BYTES = 16e6
"""Text, evenly over the training documents, from which the tokenizer learns."""


@dataclass(frozen=True)
class Corpus:
    """Prepared text."""

    folder: str
    files: dict[str, str]
    """sha256 of the corpus's files, by name; its SOURCES.md is among them."""
    train_bytes: int
    """Text that is trained on: the first part of every source."""
    share: float
    """Of the corpus's training text."""
    train_documents: int
    train_tokens: int
    heldout: dict[str, dict[str, int]]
    """Documents, tokens and bytes of text of each kind of held-out text."""
    vocab_size: int
    tokenizer: str
    """Fingerprint."""

    def path(self, name: str) -> str:
        """A file or dataset of the folder."""
        return str(Path(self.folder) / name)


def inputs(folder: Path, part: str) -> list[Path]:
    """Files of one part of a corpus folder; UserError where there is none."""
    found = sorted(p for s in SUFFIXES for p in folder.glob(f"{part}*.jsonl{s}"))
    if not found:
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
        raise UserError(f"--corpus {folder}: there is no {part}.jsonl or {part}.jsonl.zst in it ({there or 'empty'}).")
    return found


def documents(path: Path) -> Iterator[dict[str, Any]]:
    """The documents of a file; UserError where it is damaged, or where a line is no document."""
    for number, line in enumerate(_lines(path), 1):
        try:
            document = orjson.loads(line)
            assert isinstance(document["text"], str)
            assert all(isinstance(document.get(name, ""), str) for name in ("source", "cat"))
        except (ValueError, KeyError, TypeError, AssertionError):
            rule = 'it must be a JSON object with a string "text", and "source" and "cat" strings, if any'
            raise UserError(f"{path}, line {number}: {rule}.") from None
        yield document


def _lines(path: Path) -> Iterator[bytes]:
    if path.suffix == ".xz":
        try:
            with lzma.open(path) as lines:
                yield from lines
        except (EOFError, lzma.LZMAError) as error:
            raise UserError(f"{path}: damaged or truncated ({error}); copy or download it again.") from None
        return
    for read in read_chunks([path], Position(), "text", TxtRule(), limits=WINDOW):
        yield from read.chunk.data.removesuffix(b"\n").split(b"\n")


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def first_part(corpus: Path, size: float | None) -> tuple[list[dict[str, Any]], float]:
    """Training documents in the corpus's order, of every source its first ones: about `size` bytes in all (None: all).

    Returns them and their share of all text.
    """
    every = [d for path in inputs(corpus, "train") for d in documents(path)]
    sizes = [len(d["text"].encode()) for d in every]
    total: Counter[str] = Counter()
    for document, n in zip(every, sizes, strict=True):
        total[document.get("source", "")] += n
    if not any(sizes):
        raise UserError(f"--corpus {corpus}: its training text is empty.")
    share = 1.0 if size is None else min(1.0, size / sum(sizes))
    taken: Counter[str] = Counter()
    kept = []
    for document, n in zip(every, sizes, strict=True):
        source = document.get("source", "")
        if taken[source] < share * total[source]:
            kept.append(document)
            taken[source] += n
    return kept, sum(taken.values()) / sum(sizes)


def pack(corpus: Path, size: float | None, out: Path) -> Path:
    """A corpus folder with the part of this one that `size` says, packed as .xz, which needs no library to read."""
    out.mkdir(parents=True, exist_ok=True)
    parts = {"train": first_part(corpus, size)[0]}
    parts["heldout"] = [d for path in inputs(corpus, "heldout") for d in documents(path)]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 192 << 20}]
    for name, rows in parts.items():
        with lzma.open(out / f"{name}.jsonl.xz", "wb", filters=filters) as file:
            file.writelines(orjson.dumps(row) + b"\n" for row in rows)
    if (corpus / "SOURCES.md").is_file():
        shutil.copy(corpus / "SOURCES.md", out / "SOURCES.md")
    return out


def ready(corpus: Path, size: float | None, vocab_size: int, work: Path, workers: int | None = None) -> Corpus:
    """The prepared text; it is made where the work folder does not have it yet.

    `vocab_size` ids, the end-of-document token among them.
    """
    files = {p.name: sha256(p) for part in ("train", "heldout") for p in inputs(corpus, part)}
    if (corpus / "SOURCES.md").is_file():
        files["SOURCES.md"] = sha256(corpus / "SOURCES.md")
    choice = json.dumps([files, size, vocab_size, TOKENIZER_BYTES], sort_keys=True)
    folder = work / f"corpus-{hashlib.sha256(choice.encode()).hexdigest()[:12]}"
    if (folder / "corpus.json").is_file():
        return Corpus(**json.loads((folder / "corpus.json").read_text()))
    train, share = first_part(corpus, size)
    heldout = [document for path in inputs(corpus, "heldout") for document in documents(path)]
    if not any(document["text"] for document in heldout):
        raise UserError(f"--corpus {corpus}: its held-out text is empty.")
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_lines(partial / "train.jsonl", train)
    every = max(1, round(sum(len(d["text"]) for d in train) / TOKENIZER_BYTES))
    write_lines(partial / "sample.jsonl", train[::every])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    train_tokenizer([partial / "sample.jsonl"], partial / "tokenizer.json", vocab_size)
    kinds: dict[str, list[dict[str, Any]]] = {}
    for document in heldout:
        kinds.setdefault(slug(document.get("cat", "text")), []).append(document)
    write_lines(partial / "heldout.jsonl", heldout)
    for kind, rows in kinds.items():
        write_lines(partial / f"heldout-{kind}.jsonl", rows)
    counts = {}
    for name in ("train", "heldout", *(f"heldout-{kind}" for kind in kinds)):
        prepare(
            PrepareOptions(
                [str(partial / f"{name}.jsonl")], str(partial / name), str(partial / "tokenizer.json"),
                workers=workers if name == "train" else 1,
            )
        )  # fmt: skip
        meta = read_meta(read_index(str(partial / name)))
        assert meta is not None
        counts[name] = {"documents": meta.documents, "tokens": meta.tokens, "bytes": meta.text_bytes}
        (partial / f"{name}.jsonl").unlink()
        fingerprint = meta.tokenizer_fingerprint
    trained = counts.pop("train")
    made = Corpus(
        str(folder), files, trained["bytes"], share, trained["documents"], trained["tokens"],
        {name.removeprefix("heldout").removeprefix("-") or "all": told for name, told in counts.items()},
        vocab_size, fingerprint,
    )  # fmt: skip
    (partial / "sample.jsonl").unlink()
    (partial / "corpus.json").write_text(json.dumps(asdict(made), indent=1) + "\n")
    if not folder.exists():
        partial.rename(folder)
    return made


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Documents as a .jsonl file of their texts."""
    with open(path, "wb") as file:
        file.writelines(orjson.dumps({"text": row["text"]}) + b"\n" for row in rows)


def slug(kind: str) -> str:
    """A kind of text as part of a file name."""
    return "".join(c if c.isalnum() else "-" for c in kind)
