"""Decoding forms written as one pass of any rows, so that rows that go on can leave those that halt behind.

Shapes: rows [..., H]; [m, H] where rows of several sequences, or of different passes, stand side by side.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from megaponder.decoding.backbone import feature, wide
from megaponder.decoding.depth_attention import Entries
from megaponder.decoding.kv_budget import budget_mistake, entry_of
from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.packed import Packed, packed
from megaponder.decoding.passes import Run
from megaponder.decoding.ranges import check, refuse
from megaponder.decoding.slots import Slots

State = dict[str, Tensor]
"""What tokens carry from pass to pass: "x" [..., H] enters the next one, "out" [..., H] is read out if none follows."""


def by_pass(index: int | Tensor, least: int, most: int, decide: Callable[[int, Tensor], Tensor], h: Tensor) -> Tensor:
    """Who goes on after pass `index` where every token runs `least` passes and none more than `most`: bool [...].

    `decide(gate, h)` answers for the passes between: gate 0 after pass least - 1, and so on.
    """
    made = at_pass(index - (least - 1), most - least, decide, h, absent=False)
    return made | flag(index + 1 < least, h)


def flag(answer: bool | Tensor, h: Tensor) -> Tensor:
    """A rule about passes as a tensor, whether these are Python's numbers, a tensor, or torch.compile's symbols."""
    if isinstance(answer, Tensor):
        return answer.to(h.device)
    return (torch.ones if answer else torch.zeros)((), dtype=torch.bool, device=h.device)


def at_pass(
    index: int | Tensor, count: int, make: Callable[[int, Tensor], Tensor], h: Tensor, absent: float = 0.0
) -> Tensor:
    """make(index, h) [...] for 0 <= index < count, where each row may have an index of its own; elsewhere `absent`."""
    if isinstance(index, int):
        if 0 <= index < count:
            return make(index, h)
        return torch.full(h.shape[:-1], absent, device=h.device)
    out = torch.full(h.shape[:-1], absent, dtype=torch.bool if absent is False else wide(h).dtype, device=h.device)
    for i in range(count):
        if h.device.type == "cpu":  # no waiting here, so only the rows that need it
            rows = (index == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_copy(0, rows, make(i, h[rows]).to(out.dtype))
        else:
            out = torch.where(index == i, make(i, h), out)
    return out


class Stepwise(DecodingMethod):
    """A method whose tokens run one pass after the other.

    `index` is the pass: a number, or a tensor [m] where rows are in different passes; then nothing waits for a GPU.
    """

    halts: ClassVar[bool] = False
    """Whether tokens may stop before the deepest pass."""
    merge: ClassVar[bool] = False
    """Whether a pass reads the keys of all passes before it, instead of one key a token (see `Slots`)."""
    every: ClassVar[bool] = False
    """Whether a pass reads the rows of all passes of earlier tokens, so that tokens can only run in order."""
    weighs: ClassVar[bool] = False
    """Whether "key" of a state [...] is added to the attention logits of its row's key."""
    mixes: ClassVar[bool] = False
    """Whether `enter` needs the head's logits of "out"; a state may have them, as "head"."""
    extends: ClassVar[bool] = False
    """Whether tokens can run more passes than the model was trained with."""
    arguments = ("passes", "threshold", "kv_budget")
    limit: int | None = None

    def using(self, given: dict[str, Any]) -> Stepwise:
        made, passes, threshold = copy.copy(self), given.get("passes"), given.get("threshold")
        if passes is not None:
            most = self.trained()
            check("passes", passes)
            if passes > most and not self.extends:
                rule = f"it must be 1 to {most}, the passes that the model was trained with"
                refuse(("passes", passes, rule, f"use {most}"))
            made.limit = int(passes)
        if threshold is not None:
            if "threshold" not in self.options or getattr(self, "window", None) is not None:
                why = "keeps that of its budget (target)" if "threshold" in self.options else "has none"
                raise ValueError(f"threshold = {threshold}: method {self.name} {why}; leave it out")
            check("threshold", threshold)
            made.options = {**made.options, "threshold": float(threshold)}
        if (budget := given.get("kv_budget")) is not None:
            if "kv_budget" not in self.options:
                raise ValueError(f"kv_budget = {budget}: method {self.name} has no such option")
            check("kv_budget", budget)
            refuse(budget_mistake(budget, made.deepest()))
            made.options = {**made.options, "kv_budget": int(budget)}
        return made

    @property
    def kv_budget(self) -> int:
        """Passes whose keys and values a token keeps, the newest ones; 0: all."""
        return int(self.options.get("kv_budget", 0))

    @property
    def fixed(self) -> bool:
        """Whether every token runs all passes and is read out after the last one."""
        return type(self).hidden is Stepwise.hidden

    @property
    def separable(self) -> bool:
        """Whether a token's passes end where it is read out, so that each can be run by itself: not with
        Depth-Attention, whose earlier layers no pass by itself would have, or FreqKV, which compresses whole passes."""
        if feature(self.config, "depth_attention") or feature(self.config, "freqkv"):
            return False
        return self.halts or self.fixed

    def stepwise(self) -> Stepwise | None:
        return self if self.separable else None

    def trained(self) -> int:
        """The most passes of a token, as trained."""
        return 1

    def deepest(self) -> int:
        """The most passes of a token now: at most `Run.given["passes"]`; methods of fixed depth run exactly as many."""
        if self.limit is None:
            return self.trained()
        return self.limit if self.extends else min(self.limit, self.trained())

    def kv_passes(self) -> int:
        # with a budget, what a token reads depends on which tokens ran together, and pages split prompts anywhere
        return 0 if self.halts or self.kv_budget else self.deepest()

    def begin(self, model: Any, ids: Tensor, positions: Tensor) -> State:
        """What enters the first pass of tokens `ids` [...], or of rows [..., H] given in place of the table's."""
        return {"x": model.model.embed(model.model.words(ids), positions)}

    def leave(self, model: Any, index: int | Tensor, h: Tensor, state: State, positions: Tensor) -> bool | Tensor:
        """Takes in what pass `index` made of "x" (without the final norm), and says which rows go on: bool [...]."""
        state["out"] = model.model.norm(h)
        return index + 1 < self.deepest()

    def enter(self, model: Any, index: int | Tensor, state: State) -> None:
        """Makes the "x" of the pass after `index` for rows that go on."""

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        if self.halts:
            return self._gathered(model, ids, run)
        state = self.begin(model, ids, run.positions)
        run.depth = torch.full_like(run.positions, self.deepest())
        for index in range(self.deepest()):
            at = entry_of(index, self.kv_budget)
            h = model.model.stack(state["x"], at, run.entry(at), steps=(index,))
            if self.leave(model, index, h, state, run.positions):
                self.enter(model, index, state)
        return state["out"]

    def _gathered(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        if feature(self.config, "freqkv"):
            raise ValueError("with FreqKV every token runs all passes: halted tokens would leave a pass without keys")
        seq, column = run.real.nonzero(as_tuple=True)
        if run.cache is None:
            slots = Slots(len(ids), self.merge, stored=False, device=ids.device)
        else:
            slots = run.cache.by_slot(len(ids), self.merge, ids.device, self.kv_budget)
        slots.extend(ids.shape[1])
        out, depth = self.passes(model, ids[seq, column], run.positions[seq, column], seq, run.past + column, slots)
        run.depth = torch.zeros_like(run.positions).index_put((seq, column), depth)
        return out.new_zeros(*ids.shape[:2], out.shape[-1]).index_put((seq, column), out)

    def passes(
        self, model: Any, ids: Tensor, positions: Tensor, seq: Tensor, token: Tensor, slots: Slots
    ) -> tuple[Tensor, Tensor]:
        """(final-normed rows [m, H], passes run [m]) of tokens, ordered by sequence; a pass runs only those that go on.

        positions (for RoPE), seq, token [m]: where in the table of `slots` each token belongs.
        """
        net = model.model
        front, kept = Front(self, model, ids, positions, seq, token, slots), [()] * len(net.layers)
        while not front.ended:
            front.advance(net.stack(front.state["x"][None], front.index, front.view(), kept)[0])
        return torch.cat(front.done)[torch.cat(front.order).argsort()], front.depth


class Front:
    """Tokens of the same pass, ordered by sequence; those that halt stay behind.

    positions (for RoPE), seq, token [m]: where in the table of `slots` each token belongs.
    """

    def __init__(
        self, method: Stepwise, model: Any, ids: Tensor, positions: Tensor, seq: Tensor, token: Tensor, slots: Slots
    ):
        self.method, self.model, self.slots, self.index = method, model, slots, 0
        self.positions, self.seq, self.token = positions, seq, token
        self.state = method.begin(model, ids, positions)
        self.left = torch.arange(len(ids), device=ids.device)
        """Which tokens go on."""
        self.depth = torch.zeros_like(self.left)
        """[m] passes that each has run."""
        self.done: list[Tensor] = []
        """What is read out of those that have halted, and, in `order`, which they are."""
        self.order: list[Tensor] = []
        self.earlier: Entries = []

    @property
    def ended(self) -> bool:
        # in training every gate must get a gradient, so that passes without rows run, too
        return self.index == self.method.deepest() or not (len(self.left) or self.model.training)

    @property
    def at(self) -> Tensor:
        """Positions of the tokens that go on."""
        return self.positions[self.left]

    def view(self) -> Packed:
        """What the next pass reads; notes that it runs."""
        left = self.left
        self.depth[left] = self.index + 1
        layers = len(self.model.model.layers)
        view = packed(self.slots, layers, self.index, self.seq[left], self.token[left], self.at)
        view.of_all = self.earlier
        return view

    def advance(self, h: Tensor) -> None:
        """Take in what the pass made of "x" (without the final norm)."""
        go_on = self.method.leave(self.model, self.index, h, self.state, self.at)
        if isinstance(go_on, bool):
            go_on = torch.full_like(self.left, go_on, dtype=torch.bool)
        self.sift(go_on, self.state)
        if self.index < self.method.deepest():
            self.method.enter(self.model, self.index - 1, self.state)

    def sift(self, go_on: Tensor, state: State) -> None:
        """Keep the rows that `go_on` [r] to the next pass, with their state."""
        self.state, self.index = state, self.index + 1
        keep = go_on.nonzero()[:, 0]
        if len(keep) < len(go_on) or not len(keep):
            gone = (~go_on).nonzero()[:, 0]
            self.done.append(state["out"].index_select(0, gone))
            self.order.append(self.left[gone])
            self.left, self.state = self.left[keep], {name: x.index_select(0, keep) for name, x in state.items()}
            self.earlier = [(k[:, :, keep], w[:, :, keep]) for k, w in self.earlier]
