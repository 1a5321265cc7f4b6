"""Whole conversations packed into sequences, epoch after epoch: what a sequence holds depends on (seed, epoch, index).

Conversations come in the shuffled order of their epoch.  Each goes into the sequence whose room it fills best, among
the `OPEN` ones begun last, or begins another; none is divided, and what stays empty at the end is padding.  One that is
longer than a sequence is cut (`window`), so that it never loses all of its targets.

Shapes: n tokens in a sequence, which holds n + 1: the last is a target only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from megaponder.data.indexed import Index
from megaponder.data.shuffled import generator
from megaponder.errors import UserError

OPEN = 64
"""Sequences that wait for conversations that fill them."""


def pack(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Numbers of the conversations in each sequence of `room` tokens, for conversations of `lengths`, in this order."""
    waiting: list[tuple[int, int]] = []  # (tokens left, number of the sequence), the fullest first
    packs: list[list[int]] = []
    for number, length in enumerate(np.minimum(lengths, room).tolist()):
        at = bisect_left(waiting, (length, -1))
        if at < len(waiting):
            left, into = waiting.pop(at)
        else:
            left, into = room, len(packs)
            packs.append([])
        packs[into].append(number)
        if left > length:
            insort(waiting, (left - length, into))
            if len(waiting) > OPEN:
                waiting.pop(0)
    return packs


def epoch_order(lengths: np.ndarray, ids: np.ndarray, room: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The conversations `ids` (int32) of each sequence of an epoch, in the order in which the sequences are read."""
    order = ids.astype(np.int32)
    generator(seed, epoch, 0).shuffle(order)
    packs = [order[one] for one in pack(lengths[order], room)]
    shuffle = np.arange(len(packs))
    generator(seed, epoch, 1).shuffle(shuffle)
    return [packs[i] for i in shuffle]


def build_order(lengths: np.ndarray, ids: np.ndarray, room: int, seed: int, sequences: int) -> dict[str, np.ndarray]:
    """The conversations of complete epochs with at least so many sequences, one sequence after the other, and where
    each begins among them."""
    packs: list[np.ndarray] = []
    epoch = 0
    while len(packs) < max(1, sequences):
        packs += epoch_order(lengths, ids, room, seed, epoch)
        epoch += 1
    return {"conversations": np.concatenate(packs), "begins": np.cumsum([0, *map(len, packs)], dtype=np.int64)}


def sequences_in(lengths: np.ndarray, ids: np.ndarray, room: int, seed: int, epochs: int) -> int:
    """Sequences of complete `epochs`."""
    return sum(len(epoch_order(lengths, ids, room, seed, epoch)) for epoch in range(epochs))


def window(mask: np.ndarray, room: int) -> tuple[int, int]:
    """[begin, end) of the tokens that are kept of a conversation with this mask [tokens].

    The first `room` of them.  If no target is among these, the tokens up to the end of the first answer; of an answer
    that is longer than that, its beginning, behind one token of the prompt.
    """
    if len(mask) <= room or mask[:room].any():
        return 0, min(len(mask), room)
    first = int(np.argmax(mask))
    rest = np.flatnonzero(mask[first:] == 0)
    end = first + int(rest[0]) if len(rest) else len(mask)
    begin = min(end - room, first - 1)
    return begin, begin + room


def read(index: Index, number: int, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask of a conversation, int64 and float32 [at most room]; the first token is no target."""
    assert index.mask is not None
    begin = int(index.offsets[number]) // index.dtype.itemsize
    mask = index.mask.part(begin, begin + int(index.lengths[number]))
    first, end = window(mask, room)
    kept = mask[first:end].astype(np.float32)
    kept[:1] = 0.0
    return index.ids.part(begin + first, begin + end).astype(np.int64), kept


def joined(index: Index, numbers: np.ndarray, length: int, padding: int) -> dict[str, np.ndarray]:
    """A sequence of these conversations.

    text: int64 [n + 1]; targets: float32 [n], 1 where the next token is learnt; starts: int64 [n], the first token of
    each token's conversation.  Padding is a conversation of its own without targets.
    """
    text, mask = np.full(length + 1, padding, np.int64), np.zeros(length + 1, np.float32)
    starts, at = np.zeros(length + 1, np.int64), 0
    for number in numbers.tolist():
        ids, learnt = read(index, number, length + 1)
        end = at + len(ids)
        if end > length + 1:
            raise UserError(
                f"{index.prefix}.idx: damaged (conversation {number} is longer than it says); copy it again."
            )
        text[at:end], mask[at:end], starts[at:end] = ids, learnt, at
        at = end
    starts[at:] = at
    return {"text": text, "targets": mask[1:], "starts": starts[:-1]}


def summary(prefix: str, index: Index, length: int, documents: int) -> str:
    """A sentence about what becomes of the first `documents` conversations of a dataset, which are trained on, in
    sequences of `length` tokens."""
    lengths = index.lengths[:documents]
    sequences = len(pack(lengths, length + 1))
    cut = int(np.sum(lengths > length + 1))
    full = np.minimum(lengths, length + 1).sum() / (sequences * (length + 1))
    longer = f"; {cut:,} are longer than a sequence and are cut" if cut else ""
    filled = f"{full:.1%} of about {sequences:,} sequences an epoch"
    rest = index.sequences - documents
    held = f"; data.split holds back {rest:,} more" if rest else ""
    return f"{prefix}: {len(lengths):,} conversations fill {filled}, each attending to itself alone{longer}{held}."


def in_stored_order(index: Index, length: int, padding: int) -> Iterator[dict[str, np.ndarray]]:
    """`joined` of all conversations, once, with little changed in their order: for evaluation."""
    for numbers in pack(index.lengths[:], length + 1):
        yield joined(index, np.array(numbers), length, padding)
