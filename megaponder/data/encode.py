"""Tokenize chunks, in this process or in many, in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait

import numpy as np

from megaponder.data.documents import Chunk, Problem, TxtRule, documents
from megaponder.data.encoded import Encoded
from megaponder.data.readers import Read
from megaponder.data.samples import SampleEncoder
from megaponder.data.template import Template
from megaponder.data.tokenizer import load_tokenizer
from megaponder.errors import UserError

TEXT_FIELD = "text"
"""The field of a record that is read if none is named; of conversations, those that `conversations` knows."""


@dataclass(frozen=True)
class EncodeOptions:
    """What a worker needs to know."""

    tokenizer: str
    eod: str | None
    append_eod: bool
    special_tokens: bool
    specials_as_text: bool
    dtype: str
    field: str
    rule: TxtRule
    kinds: tuple[str, ...]
    """Form of each input file."""
    template: Template | None = None
    """Of conversations; None: the inputs are texts."""


class Encoder:
    """Turns a chunk into token ids, all its documents in one call of the tokenizer."""

    def __init__(self, options: EncodeOptions):
        self.options = options
        self.tokenizer = load_tokenizer(
            options.tokenizer, options.eod, options.special_tokens, options.specials_as_text
        )
        # by their first characters, so that most texts are searched once or twice instead of once per token
        self._spellings: dict[str, list[str]] = {}
        for token in self.tokenizer.special_tokens if self.tokenizer.spells_specials else ():
            self._spellings.setdefault(token[:2], []).append(token)

    def __call__(self, chunk: Chunk) -> Encoded:
        o, texts, problems = self.options, [], []
        for _, item in documents(chunk, o.kinds[chunk.file], o.field, o.rule):
            if isinstance(item, Problem):
                problems.append(item)
            else:
                texts.append(item)
        flat, counts = self.tokenizer.encode_flat(texts)
        lengths = counts[counts > 0]
        if o.append_eod and self.tokenizer.eod_id is not None:
            flat, lengths = _end_documents(flat, lengths, self.tokenizer.eod_id)
        return Encoded(
            flat.astype(o.dtype).tobytes(),
            lengths.tobytes(),
            sum(len(text) if text.isascii() else len(text.encode()) for text in texts),
            int(flat.max()) if len(flat) else -1,
            len(texts) - len(lengths),
            tuple(problems),
            self._spelled(texts),
        )

    def _spelled(self, texts: list[str]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for begin, tokens in self._spellings.items():
            for text in texts:
                if begin in text:
                    found.update({token: count for token in tokens if (count := text.count(token))})
        return dict(found)


def _end_documents(flat: np.ndarray, lengths: np.ndarray, eod: int) -> tuple[np.ndarray, np.ndarray]:
    """Put `eod` after every document that does not end with it already (from its text or a template)."""
    ends = np.cumsum(lengths, dtype=np.int64)
    lacking = flat[ends - 1] != eod
    return np.insert(flat.astype(np.int32), ends[lacking], eod), lengths + lacking.astype(np.int32)


def _make(options: EncodeOptions) -> Callable[[Chunk], Encoded]:
    if options.template is None:
        return Encoder(options)
    tokenizer = load_tokenizer(options.tokenizer, options.eod)
    field = None if options.field == TEXT_FIELD else options.field
    return SampleEncoder(tokenizer, options.template, options.dtype, field, not options.specials_as_text)


_encoder: Callable[[Chunk], Encoded] | None = None  # of a worker process


def _start_worker(options: EncodeOptions) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()
    assert parent is not None  # this runs in workers only

    def leave_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)  # the parent was killed: nobody would read the results

    threading.Thread(target=leave_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = _make(options)


def _encode(chunk: Chunk) -> Encoded:
    assert _encoder is not None  # set by _start_worker
    return _encoder(chunk)


def encode_all(
    reads: Iterable[Read], options: EncodeOptions, workers: int
) -> Generator[tuple[Read, Encoded], None, None]:
    """Encode every chunk; results come in the order of `reads`, whatever the number of workers.

    At most four chunks per worker are in memory.  Raises UserError when a worker process dies.
    """
    if workers == 1:
        encoder = _make(options)
        for read in reads:
            yield read, encoder(read.chunk)
        return
    context = multiprocessing.get_context(
        "spawn"
    )  # fork would copy locks held by the progress bar's and tokenizer's threads
    pool = ProcessPoolExecutor(workers, context, _start_worker, (options,))
    pending: deque[tuple[Read, Future[Encoded]]] = deque()
    try:
        for read in reads:
            pending.append((read, pool.submit(_encode, read.chunk)))
            if len(pending) >= 4 * workers:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "A worker process died while tokenizing, most often because memory ran out; run again with fewer --workers "
            "to continue where this run stopped."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
