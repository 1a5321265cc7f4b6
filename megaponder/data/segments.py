"""Exact and several times faster encoding for GPT-2-style byte-level BPE: each word is tokenized once.

Such a tokenizer first splits the text by a pattern (GPT-2's) and then encodes every piece separately.  So text may be
cut wherever that pattern always cuts, and a segment that was seen before has the same ids again.  The cuts here are

    (1) between a character that is not white space and one of space, tab, newline, carriage return
    (2) after a segment of optional white space and ASCII letters, before an ASCII character that is neither letter nor
        apostrophe (the pattern has contractions such as 's) nor non-ASCII (it may be a letter, or combine with one)

No alternative of the pattern matches across either cut, it has no look-behind, and its only look-ahead asks whether
white space ends a run.  NFC composes nothing across them, since no ASCII character combines with the one before.
Texts with other white space (no-break space, form feed ...) could have a run across cut (1): they are encoded in one
piece. `supports` is strict: any other pipeline is left to the tokenizers library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

SEGMENT = re.compile(
    r"[ \t\n\r]*[A-Za-z]+(?=[\t\n\r -&(-@\[-`{-~]|\Z)"  # cut (2); the class is ASCII without letters and apostrophe
    r"|[ \t\n\r]*[^ \t\n\r]+"  # up to cut (1)
    r"|[ \t\n\r]+"
)
OTHER_SPACE = re.compile(r"[^\S \t\n\r]")
MOST_SEGMENTS = 1 << 19
"""Segments in the cache, about 100 MB at most; then it is emptied."""


def _keeps_cuts(token: dict[str, Any]) -> bool:
    """No occurrence of an added token can span a cut or depend on what lies beyond one."""
    content = token["content"]
    if token.get("lstrip") or token.get("rstrip") or token.get("single_word") or not content:
        return False
    blank = content.strip(" \t\n\r") == ""
    return blank or not (re.search(r"\s", content) or re.match(r"[A-Za-z]", content))


def supports(content: dict[str, Any]) -> bool:
    """Whether the tokenizer.json `content` describes a pipeline for which cutting into segments is exact."""
    model, before = content.get("model") or {}, content.get("pre_tokenizer") or {}
    return (
        model.get("type", "BPE") == "BPE"
        and not model.get("dropout")
        and before.get("type") == "ByteLevel"
        and before.get("add_prefix_space") is False
        and before.get("use_regex", True) is True
        and (content.get("normalizer") is None or content["normalizer"] == {"type": "NFC"})
        and all(_keeps_cuts(token) for token in content.get("added_tokens") or [])
    )


class SegmentEncoder:
    """Encodes texts through a cache of segments; `encode` gives the ids of each text as native int32."""

    def __init__(self, encode: Callable[[list[str]], list[bytes]]):
        self._encode = encode
        self._known: dict[str, bytes] = {}

    def _learn(self, segments: set[str]) -> None:
        if len(self._known) + len(segments) > MOST_SEGMENTS:
            self._known.clear()
        new = list(segments.difference(self._known))
        self._known.update(zip(new, self._encode(new), strict=True))

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text, as native int32."""
        whole = [i for i, text in enumerate(texts) if OTHER_SPACE.search(text)]
        apart = dict(zip(whole, self._encode([texts[i] for i in whole]), strict=True)) if whole else {}
        pieces = [() if i in apart else SEGMENT.findall(text) for i, text in enumerate(texts)]
        unknown = set().union(*pieces)
        if not unknown <= self._known.keys():
            self._learn(unknown)
        known = self._known
        return [apart[i] if i in apart else b"".join([known[p] for p in part]) for i, part in enumerate(pieces)]
