"""Conversations to token ids, and a mark at every token that is learnt."""

from __future__ import annotations

from collections import Counter

import numpy as np

from megaponder.data.conversations import ANSWERS, BadRecordError, Conversation, conversation
from megaponder.data.documents import Chunk, Problem, records
from megaponder.data.encoded import Encoded
from megaponder.data.template import Template
from megaponder.data.tokenizer import Tokenizer


def encode(talk: Conversation, template: Template, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and 1 for each of them that is learnt, else 0.

    Learnt are all tokens that begin within an answer, with the token that ends it, and never the first token, which
    nothing predicts.  What follows the last answer is left out.  A last answer that no special token ends is
    followed by the end-of-document token, so that a model learns to stop.

    Raises BadRecordError for a conversation that the template refuses, or whose answers have no token.
    """
    text, answers = template.render(talk)
    ids, begins = tokenizer.encode_marked(text)
    special = set(tokenizer.special_tokens.values())
    places, marks = np.array(begins, np.int64), np.zeros(len(ids), np.int8)
    for begin, end in answers:
        inside = np.flatnonzero((places >= begin) & (places < end))
        if len(inside):
            marks[inside] = 1
            _end_with_token(marks, ids, text, places, int(inside[-1]), special)
    marks[:1] = 0
    learnt = np.flatnonzero(marks)
    if not len(learnt):
        raise BadRecordError("no_answer", "the answers have no token, so there is nothing to learn")
    ids, kept = ids[: learnt[-1] + 1], marks[: learnt[-1] + 1].tolist()
    if ids[-1] not in special and tokenizer.eod_id is not None:
        return [*ids, tokenizer.eod_id], [*kept, 1]
    return ids, kept


def _end_with_token(
    marks: np.ndarray, ids: list[int], text: str, places: np.ndarray, last: int, special: set[int]
) -> None:
    """The end of an answer, from its token `last` backwards: white space after the special token that ends it is not
    learnt, since nobody writes on after that token."""
    at = last
    while at > 0 and marks[at] and ids[at] not in special:
        at -= 1
    if marks[at] and ids[at] in special and at < last:
        until = places[last + 1] if last + 1 < len(places) else len(text)
        if not text[places[at + 1] : until].strip():
            marks[at + 1 : last + 1] = 0


class SampleEncoder:
    """Turns a chunk of records into token ids and marks."""

    def __init__(
        self, tokenizer: Tokenizer, template: Template, dtype: str, field: str | None, specials_in_texts: bool
    ):
        self._tokenizer, self._template, self._dtype, self._field = tokenizer, template, dtype, field
        self._special = set(tokenizer.special_tokens.values())
        self._spelled = () if specials_in_texts else tuple(tokenizer.special_tokens)

    def __call__(self, chunk: Chunk) -> Encoded:
        ids: list[int] = []
        marks: list[int] = []
        lengths: list[int] = []
        problems: list[Problem] = []
        ends: Counter[str] = Counter()
        text_bytes = answers = unended = 0
        for line, record in records(chunk):
            if isinstance(record, Problem):
                problems.append(record)
                continue
            try:
                talk = conversation(record, self._field)
                self._refuse_special(talk)
                found, learnt = encode(talk, self._template, self._tokenizer)
            except BadRecordError as error:
                problems.append(Problem(line, error.reason, str(error)))
                continue
            ids += found
            marks += learnt
            lengths.append(len(found))
            ends[str(found[-1])] += 1
            text_bytes += talk.text_bytes
            answers += sum(message["role"] == ANSWERS for message in talk.messages)
            lasts = np.flatnonzero(np.diff(learnt, append=0) < 0).tolist()
            unended += sum(found[i] not in self._special for i in lasts)
        return Encoded(
            np.array(ids, self._dtype).tobytes(), np.array(lengths, np.int32).tobytes(), text_bytes,
            max(ids, default=-1), 0, tuple(problems), {}, np.array(marks, np.int8).tobytes(), answers, dict(ends),
            unended,
        )  # fmt: skip

    def _refuse_special(self, talk: Conversation) -> None:
        """In a rendered text nobody could tell a special token that a message spells out from the template's own."""
        for message in talk.messages:
            for token in self._spelled:
                if token in message["content"]:
                    raise BadRecordError(
                        "special_token",
                        f"a message spells out the special token {token}; let it become the token with "
                        "--special-spellings token",
                    )
