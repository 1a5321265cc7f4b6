"""Text files in, indexed dataset out: `prepare` reads, tokenizes in many processes, and writes .bin, .idx and .json."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import orjson

from megaponder.data.documents import TxtRule
from megaponder.data.encode import TEXT_FIELD, EncodeOptions, encode_all
from megaponder.data.indexed import best_dtype, read_index
from megaponder.data.info import Conversations, DatasetMeta, SourceFile, read_meta
from megaponder.data.readers import CHUNK_BYTES, MIB, Limits, kind_of, list_inputs, read_chunks
from megaponder.data.template import Template, find_template
from megaponder.data.tokenizer import EOD_TOKENS, Tokenizer, load_tokenizer
from megaponder.data.workspace import State, Workspace
from megaponder.errors import IN_THE_WAY, ConfigError, UserError, of_file

EXAMPLES = 5  # problems quoted in a summary


@dataclass(frozen=True)
class PrepareOptions:
    """Everything that decides what `prepare` writes, and how fast."""

    inputs: list[str]
    """Files or folders: .jsonl, .json and .txt, also as .gz or .zst, and .parquet."""
    output: str
    """Path of the dataset without .bin/.idx."""
    tokenizer: str
    """tokenizer.json, sentencepiece .model, a folder with one, or "bytes"."""
    eod: str | None = None
    """Token that ends every document; default: the tokenizer's EOS, otherwise a well-known one."""
    append_eod: bool = True
    """End every document with the EOD token."""
    special_tokens: bool = False
    """Let the tokenizer's own template add BOS/EOS to each document."""
    special_spellings: Literal["text", "token"] = "text"
    """How a special token that is spelled out in a text is encoded: as text, or as the token."""
    field: str = TEXT_FIELD
    """Field (column) that contains the text, or of conversations the list of messages."""
    template: str | None = None
    """The inputs are conversations, written with this chat template: alpaca, chatml, tokenizer, or a Jinja file."""
    txt_split: str = "file"
    """What a document is in a .txt file: file, line, blank (parts between blank lines), or a separator line."""
    on_error: Literal["fail", "skip"] = "fail"
    """Unreadable documents end the run with file and line, or are skipped and counted."""
    max_document: int = 256
    """MiB of the largest document, decompressed."""
    zstd_window: int = 128
    """MiB of the largest window that a .zst file may require."""
    workers: int | None = None
    """Processes that tokenize; default: the CPUs available to this process, or one for inputs of a few chunks."""
    overwrite: bool = False
    """Replace an existing dataset of that name."""
    restart: bool = False
    """Discard what an earlier, interrupted run left."""
    chunk_bytes: int = CHUNK_BYTES
    """Text that a worker tokenizes in one call."""
    shard_bytes: int = 1 << 28
    """Amount of text after which work is made durable: the most that a killed run can lose."""


@dataclass(frozen=True)
class PrepareProgress:
    """Progress of a run."""

    read_bytes: int
    """Input read, in bytes on disk."""
    total_bytes: int
    """All input, in bytes on disk."""
    text_bytes: int
    """Text tokenized by this run."""
    documents: int
    tokens: int
    seconds: float
    """Since this run started."""


@dataclass(frozen=True)
class PrepareSummary:
    """What a run has written."""

    prefix: str
    meta: DatasetMeta
    seconds: float
    """Of this run."""
    text_bytes: int
    """Text that this run tokenized."""
    resumed_documents: int
    """Documents that an earlier, interrupted run had already done."""
    examples: list[str] = field(default_factory=list)
    """The first skipped documents of this run, with file and line."""
    unended: int = 0
    """Of conversations: answers that no special token ends."""


def _need_eod(options: PrepareOptions, tokenizer: Tokenizer) -> int | None:
    if not options.append_eod:
        return None
    if tokenizer.eod_id is None:
        raise UserError(
            f"{options.tokenizer}: this tokenizer does not name an end-of-document token and has none of "
            f"{', '.join(EOD_TOKENS)}; choose one of its tokens with --eod TOKEN, or write documents without one with "
            f"--no-append-eod."
        )
    return tokenizer.eod_id


def _fingerprint(
    options: PrepareOptions, files: list[Path], tokenizer: Tokenizer, eod_id: int | None, template: Template | None
) -> str:
    """Hash of everything that determines the bytes written, except the error policy (see `_start_state`)."""
    parts = {
        "format": 3,
        "files": [(os.path.realpath(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files],
        "tokenizer": tokenizer.fingerprint,
        "eod": eod_id,
        "special_tokens": options.special_tokens,
        "special_spellings": options.special_spellings,
        "field": options.field,
        "txt_split": options.txt_split,
    } | ({} if template is None else {"template": (template.text, template.bos, template.eos)})
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _start_state(options: PrepareOptions, work: Workspace, fingerprint: str) -> State:
    """Where to start.  UserError if an earlier run's work belongs to other inputs and options."""
    state = None if options.restart else work.stored()
    if state is None or (not state.documents and not state.skipped):
        return State(fingerprint)
    if state.fingerprint != fingerprint:
        raise UserError(
            f"{work.folder}: an interrupted run with other inputs or options left its work here; use those "
            f"to continue it, or discard it with --restart."
        )
    unreadable = sum(count for reason, count in state.skipped.items() if reason != "empty")
    if unreadable and options.on_error == "fail":
        raise UserError(
            f"{work.folder}: the interrupted run skipped {unreadable} unreadable documents; continue it with "
            f"--on-error skip, or discard it with --restart."
        )
    return state


def _refuse_existing(options: PrepareOptions, work: Workspace, state: State) -> None:
    existing = [work.final(suffix) for suffix in (".idx", ".bin") if work.final(suffix).exists()]
    if existing and not options.overwrite and not state.whole:
        raise UserError(f"{existing[0]}: already exists; choose another --output, or replace it with --overwrite.")


def _work_through(
    options: PrepareOptions,
    files: list[Path],
    work: Workspace,
    encode_options: EncodeOptions,
    on_progress: Callable[[PrepareProgress], None] | None,
) -> list[str]:
    """Read, encode and append everything after the state's position; returns examples of skipped documents."""
    examples: list[str] = []
    began, already, saved = time.monotonic(), work.state.text_bytes, work.state.text_bytes
    sizes = [f.stat().st_size for f in files]
    rule = encode_options.rule
    limits = Limits(options.max_document * MIB, options.zstd_window * MIB)
    reads = read_chunks(files, work.state.position, options.field, rule, options.chunk_bytes, limits)
    results = encode_all(reads, encode_options, _workers(options, files))
    try:
        for read, encoded in results:
            name = files[read.chunk.file]
            if encoded.problems and options.on_error == "fail":
                problem = encoded.problems[0]
                raise UserError(
                    f"{name}:{problem.line}: {problem.message}; fix the file, or skip such documents with "
                    f"--on-error skip."
                )
            examples += [f"{name}:{p.line}: {p.message}" for p in encoded.problems[: EXAMPLES - len(examples)]]
            skipped = Counter(p.reason for p in encoded.problems)
            if encoded.empty:
                skipped["empty"] = encoded.empty
            work.add(encoded, read.end, skipped)
            if work.state.text_bytes - saved >= options.shard_bytes:
                work.save()
                saved = work.state.text_bytes
            if on_progress is not None:
                done = sum(sizes[: read.chunk.file]) + read.disk_bytes
                state, seconds = work.state, time.monotonic() - began
                text = state.text_bytes - already
                on_progress(PrepareProgress(done, sum(sizes), text, state.documents, state.tokens, seconds))
    except BaseException:  # also Ctrl-C: chunks are added completely and in order, so everything added is valid
        work.save()
        raise
    finally:
        results.close()
    return examples


def _encode_options(options: PrepareOptions, files: list[Path], dtype: str, template: Template | None) -> EncodeOptions:
    return EncodeOptions(
        tokenizer=options.tokenizer,
        eod=options.eod,
        append_eod=options.append_eod,
        special_tokens=options.special_tokens,
        specials_as_text=options.special_spellings == "text",
        dtype=dtype,
        field=options.field,
        rule=TxtRule(options.txt_split),
        kinds=tuple(kind_of(f) or "" for f in files),
        template=template,
    )


def _template(options: PrepareOptions, files: list[Path], tokenizer: Tokenizer) -> Template | None:
    """The template of conversations.  UserError for inputs and options that are not for them."""
    if options.template is None:
        return None
    for path in files:
        if kind_of(path) not in ("jsonl", "json"):
            raise UserError(f"{path}: conversations (--template) are read from .jsonl and .json files.")
    for given, flag in ((not options.append_eod, "--no-append-eod"), (options.special_tokens, "--special-tokens")):
        if given:
            raise UserError(f"{flag}: the template says how a conversation begins and ends; leave it out.")
    return find_template(options.template, tokenizer)


def _conversations(template: Template | None, done: State) -> Conversations | None:
    if template is None:
        return None
    end = max(done.ends, key=done.ends.__getitem__)
    return Conversations(template.name, template.text, template.bos, template.eos, done.answers, done.targets, int(end))


def _meta(
    options: PrepareOptions,
    tokenizer: Tokenizer,
    eod_id: int | None,
    files: list[Path],
    dtype: str,
    done: State,
    template: Template | None,
) -> DatasetMeta:
    per_file = [*done.per_file, *[(0, 0)] * (len(files) - len(done.per_file))]
    return DatasetMeta(
        tokenizer=tokenizer.name,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod_id=eod_id,
        max_id=done.max_id,
        documents=done.documents,
        tokens=done.tokens,
        dtype=dtype,
        text_bytes=done.text_bytes,
        sources=[SourceFile(str(f), f.stat().st_size, *counts) for f, counts in zip(files, per_file, strict=True)],
        skipped=done.skipped,
        special_tokens=tokenizer.special_tokens,
        special_spellings=options.special_spellings,
        spelled=done.spelled,
        conversations=_conversations(template, done),
    )


def _nothing(options: PrepareOptions, skipped: dict[str, int], examples: list[str]) -> UserError:
    """The error of a run that wrote no document."""
    inputs = ", ".join(options.inputs)
    if not any(count for reason, count in skipped.items() if reason != "empty"):
        return UserError(f"{inputs}: no document contains any token; nothing was written.")
    counts = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
    first = f"; the first is {examples[0]}" if examples else ""
    return UserError(f"{inputs}: all documents were skipped ({counts}){first}; nothing was written.")


def _check(options: PrepareOptions) -> None:
    """ConfigError for impossible options."""
    if options.on_error not in ("fail", "skip"):
        raise ConfigError("on_error", options.on_error, "must be fail or skip", "use fail")
    if options.special_spellings not in ("text", "token"):
        raise ConfigError("special_spellings", options.special_spellings, "must be text or token", "use text")
    if not options.txt_split:
        raise ConfigError("txt_split", "", "must be file, line, blank or a separator line", "use file")
    if options.workers is not None and options.workers < 1:
        raise ConfigError("workers", options.workers, "must be 1 or more", "use 1")
    if options.max_document < 1:
        raise ConfigError("max_document", options.max_document, "must be 1 MiB or more", "use 256")
    if not 1 <= options.zstd_window <= 2048:
        raise ConfigError("zstd_window", options.zstd_window, "must be 1 to 2048 MiB", "use 128")
    if not options.output or options.output.endswith(("/", "/.", "/..")) or Path(options.output).name in ("", ".."):
        example = f"{options.output.rstrip('/.') or 'data'}/text"
        raise ConfigError("output", options.output, "is a path that ends in a dataset's name", f"use {example}")
    if Path(options.output).suffix in (".bin", ".idx"):
        raise ConfigError("output", options.output, "is a path without .bin/.idx", f"use {options.output[:-4]}")


def _workers(options: PrepareOptions, files: list[Path]) -> int:
    if options.workers is not None:
        return options.workers
    chunks = sum(f.stat().st_size for f in files) // options.chunk_bytes
    return len(os.sched_getaffinity(0)) if chunks > 4 else 1  # otherwise starting processes takes longer than the work


def prepare(options: PrepareOptions, on_progress: Callable[[PrepareProgress], None] | None = None) -> PrepareSummary:
    """Write the indexed dataset `options.output`; the same bytes whatever the number of workers.

    An interrupted run leaves `<output>.partial`; the same call continues it.  Nothing appears under the final name
    before all of it is on disk.  Raises UserError or ConfigError for anything the user can fix.
    """
    began = time.monotonic()
    _check(options)
    files = list_inputs(options.inputs)
    tokenizer = load_tokenizer(options.tokenizer, options.eod, options.special_tokens)
    eod_id = _need_eod(options, tokenizer)
    template = _template(options, files, tokenizer)
    dtype = best_dtype(tokenizer.vocab_size)
    examples: list[str] = []
    try:
        with Workspace(Path(options.output), dtype, masked=template is not None) as work:
            start = _start_state(options, work, _fingerprint(options, files, tokenizer, eod_id, template))
            _refuse_existing(options, work, start)
            work.open(start)
            if not start.whole:
                encode_options = _encode_options(options, files, dtype, template)
                examples = _work_through(options, files, work, encode_options, on_progress)
                if work.state.documents == 0:
                    skipped = work.state.skipped
                    work.discard()
                    raise _nothing(options, skipped, examples)
            done = work.state
            if not start.whole:
                work.complete(_meta(options, tokenizer, eod_id, files, dtype, done, template))
            work.publish()
    except OSError as error:
        if error.errno in IN_THE_WAY and (problem := of_file(error)) is not None:
            raise problem from error
        place = error.errno in (errno.ENOENT, errno.EPERM, errno.EROFS)
        fix = "choose an --output that can be written" if place else "run the same command again to continue"
        raise UserError(f"{options.output}: writing failed ({error}); {fix}.") from error
    meta = read_meta(read_index(options.output))
    assert meta is not None  # it has just been written
    seconds, text = time.monotonic() - began, done.text_bytes - start.text_bytes
    return PrepareSummary(options.output, meta, seconds, text, start.documents, examples, done.unended)
