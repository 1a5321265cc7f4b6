"""What tokenizing a chunk gives."""

from __future__ import annotations

from dataclasses import dataclass, field

from megaponder.data.documents import Problem


@dataclass(frozen=True)
class Encoded:
    """Documents of one chunk, ready to be written."""

    ids: bytes
    """Token ids of all documents, in the dataset's number type."""
    lengths: bytes
    """int32 tokens of each document."""
    text_bytes: int
    max_id: int
    empty: int
    """Documents without any token."""
    problems: tuple[Problem, ...]
    """Documents that could not be read."""
    spelled: dict[str, int]
    """How often each special token is spelled out in the texts."""
    mask: bytes = b""
    """Of conversations: for each token 1 if it is learnt, else 0."""
    answers: int = 0
    """Of conversations: messages of the assistant."""
    ends: dict[str, int] = field(default_factory=dict)
    """Of conversations: the ids (as text) that end the last answers, and how often."""
    unended: int = 0
    """Of conversations: answers that no special token ends."""
