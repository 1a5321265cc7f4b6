"""Where each text of a depth-wise batch stands, what a step reads of it, and what the step changes.

Shapes: B rows (texts in work; one more for rows that only fill a step), P passes, T tokens, n rows of a step, k keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

PAGE = 16
"""Slots of a page."""


class Book(NamedTuple):
    """Of every row; steps change these tensors in place."""

    text: Tensor
    """[B + 1, T + 1] words."""
    depth: Tensor
    """[B + 1, T] passes that each token ran."""
    at: Tensor
    """[B + 1] the token in work."""
    passed: Tensor
    """[B + 1] passes that it has run: the number of its next one."""
    used: Tensor
    """[B + 1] slots used."""
    known: Tensor
    """[B + 1] words that the text began with."""
    most: Tensor
    """[B + 1] the length at which the text ends."""
    live: Tensor
    """[B + 1] False for rows without text."""
    page: Tensor
    """[B + 1, ...] pages of each row, in the order of its slots."""
    table: Tensor
    """[B + 1, P, T] the slot of each pass of each token."""
    pass_of: Tensor
    """The pass that each slot belongs to."""


class Step(NamedTuple):
    """What a step needs to know of its rows [n]."""

    at: Tensor
    passed: Tensor
    used: Tensor
    live: Tensor
    fresh: Tensor
    """Whether the slot is one that the row did not have."""
    word: Tensor
    """The token in work."""
    slot: Tensor
    """Where keys and values go."""
    found: Tensor
    """[n, k] slots that the rows may read, as far as `mask` [n, k] says."""
    mask: Tensor


def begin_step(book: Book, lane: Tensor, keys: int, merge: bool, every: bool, window: int, budget: int) -> Step:
    """A step of the rows `lane` [n], which read at most `keys` keys; notes the new slots.

    merge, every, budget: as of `Stepwise`, whose `kv_budget` is the last.
    """
    at, index, used, live = book.at[lane], book.passed[lane], book.used[lane], book.live[lane]
    slot, fresh = book.page[lane, used // PAGE] * PAGE + used % PAGE, live
    if 0 < budget < book.table.shape[1]:
        fresh = live & (index < budget)
        slot = torch.where(fresh, slot, book.table[lane, (index - budget).clamp(min=0), at])
    slot = torch.where(live, slot, 0)
    order = torch.arange(keys, device=lane.device)
    book.pass_of[slot] = index.to(torch.int8)
    if merge:
        inside = order.clamp(max=book.page.shape[1] * PAGE - 1)
        found = book.page[lane[:, None], inside // PAGE] * PAGE + inside % PAGE
        mask = order <= used[:, None]
        if not every:
            mask = mask & (book.pass_of[found] <= index[:, None])
    else:
        depths = torch.arange(book.table.shape[1], device=lane.device)
        place = (lane[:, None], depths, at[:, None])
        takes = (depths % budget if budget else depths) >= index[:, None]
        book.table[place] = torch.where(takes, slot[:, None], book.table[place])
        found = book.table[lane[:, None], index[:, None], order.clamp(max=book.table.shape[2] - 1)]
        mask = order <= at[:, None]
        if window:
            mask = mask & (order > at[:, None] - window)
        found = torch.where(mask, found, 0)
    return Step(at, index, used, live, fresh, book.text[lane, at], slot, found, mask)


def end_step(book: Book, lane: Tensor, step: Step, go_on: Tensor, word: Tensor, eos: int | None) -> None:
    """Rows that `go_on` [n] run their next pass; the others' texts are continued by `word` [n]."""
    at, index = step.at, step.passed
    ends = step.live & ~go_on
    new = ends & (at + 1 >= book.known[lane])
    book.depth[lane, at] = torch.where(ends, index + 1, book.depth[lane, at])
    book.text[lane, at + 1] = torch.where(new, word, book.text[lane, at + 1])
    at = at + ends
    over = ends & (at + 1 >= book.most[lane])
    if eos is not None:
        over = over | (new & (word == eos))
    book.at[lane], book.used[lane] = at, step.used + step.fresh
    book.passed[lane] = torch.where(go_on, index + 1, 0)
    book.live[lane] = step.live & ~over


@cache
def compiled_steps() -> tuple[Callable[..., Step], Callable[..., None]]:
    """`begin_step` and `end_step`, each a few kernels instead of dozens."""
    return torch.compile(begin_step), torch.compile(end_step)
