"""Self-speculation: the predictions of early passes draft some tokens, and the deeper passes of all of them verify.

The early passes of a token depend on nothing but the early passes of tokens before it, so drafts that hold cost nothing
extra, and the text is the greedy text of full depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaponder.decoding.backbone import feature, wide
from megaponder.decoding.packed import packed
from megaponder.decoding.slots import Slots
from megaponder.decoding.steps import State, Stepwise
from megaponder.errors import ConfigError, UserError


@dataclass(frozen=True)
class Speculation:
    """A greedy text, and how its drafts did."""

    tokens: list[int]
    rounds: int
    """Of drafting and verifying."""
    traversals: int
    """Of the layer stack, for one token or for several at once: on a GPU, how often all weights are read."""

    @property
    def mean_length(self) -> float:
        """New tokens a round; 1 where every draft failed."""
        return len(self.tokens) / self.rounds


@torch.no_grad()
def speculate(
    model: Any, prompt: list[int], most: int, *, drafted: int = 4, by: int = 1, eos: int | None = None, **given: Any
) -> Speculation:
    """Greedy continuation of `prompt` by at most `most` tokens: `drafted` tokens a round, by their first `by` passes.

    `given`: `passes` and `threshold`, as of the model's `forward`.  UserError for a method without passes to skip.
    """
    for name, kind, reason in (
        ("depth_attention", "Depth-Attention", "passes would run one by one, without the layers of earlier ones"),
        ("freqkv", "FreqKV", "pages keep keys as they are"),
    ):
        if feature(model.config, name):
            raise UserError(f"a model with {kind} cannot draft by early passes: {reason}; leave speculate out.")
    form = model.ponder.using(given).stepwise()
    if form is None or form.every or not form.separable:
        raise UserError(f"method {model.ponder.name} has no early passes that could draft; leave speculate out.")
    method = form.using(given)
    if method.kv_budget:
        raise UserError(
            f"kv_budget = {method.kv_budget}: drafts would read what deeper passes have replaced; set it to 0."
        )
    if method.deepest() == 1:
        raise UserError("a token has one pass, so no deeper one could verify drafts; leave speculate out.")
    if not 0 < by < method.deepest():
        rule = f"it must be at least 1 and less than the {method.deepest()} passes of a token"
        raise ConfigError("by", by, rule, "use 1")
    if drafted < 1:
        raise ConfigError("drafted", drafted, "it must be at least 1", "use 4")
    return _Speculator(model, method, by).run(prompt, most, drafted, eos)


class _Speculator:
    def __init__(self, model: Any, method: Stepwise, by: int):
        self.model, self.method, self.by = model, method, by
        self.traversals = 0
        self.early = method.using({"passes": by})
        self.slots = Slots(1, method.merge, device=model.device)

    def run(self, prompt: list[int], most: int, drafted: int, eos: int | None) -> Speculation:
        text, rounds, device = list(prompt), 0, self.model.device
        self.slots.extend(len(prompt) + most + drafted)
        if begin := len(text) - 1:
            token = torch.arange(begin, device=device)
            ids = torch.tensor(text[:-1], device=device)
            self.method.passes(self.model, ids, token, torch.zeros_like(token), token, self.slots)
        while len(text) < len(prompt) + most and (eos is None or len(text) == len(prompt) or text[-1] != eos):
            count = min(drafted, len(prompt) + most - len(text))
            begin, rounds = len(text) - 1, rounds + 1
            drafts, outs = self._draft(text[-1], begin, count)
            held = next((i for i in range(count - 1) if drafts[i] != outs[i]), count - 1)
            new = outs[: held + 1]
            if eos in new:
                new = new[: new.index(eos) + 1]
            text += new
            if held < count - 1:  # the tokens after the first wrong draft were never there
                self.slots.table[:, :, begin + held + 1 :] = -1
                self.slots.compact()
        return Speculation(text[len(prompt) :], rounds, self.traversals)

    def _draft(self, word: int, begin: int, count: int) -> tuple[list[int], list[int]]:
        """(drafted, verified) words that follow tokens `begin` .. begin + count - 1."""
        drafts, waiting, where = [], [], []
        outs: list[Tensor | None] = [None] * count
        for i in range(count):
            at = torch.tensor([begin + i], device=self.model.device)
            state = self.method.begin(self.model, torch.tensor([word], device=at.device), at)
            for index in range(self.by):
                h = self._pass(index, state, at)
                draft = dict(state)
                if not bool(self.method.leave(self.model, index, h, state, at)):
                    draft = state
                    outs[i] = state["out"]  # it has halted, so this is final
                    break
                if index + 1 == self.by:
                    self.early.leave(self.model, index, h, draft, at)
                self.method.enter(self.model, index, state)
            word = int(self._word(draft["out"]))
            drafts.append(word)
            if outs[i] is None:
                waiting.append(state)
                where.append(i)
        if waiting:
            state = {name: torch.cat([s[name] for s in waiting]) for name in waiting[0]}
            left = torch.tensor(where, device=self.model.device)
            for index in range(self.by, self.method.deepest()):
                h = self._pass(index, state, begin + left)
                go_on = self.method.leave(self.model, index, h, state, begin + left)
                go_on = torch.full_like(left, go_on, dtype=torch.bool) if isinstance(go_on, bool) else go_on
                if go_on.all():
                    self.method.enter(self.model, index, state)
                    continue
                for i, out in zip(left[~go_on].tolist(), state["out"][~go_on], strict=True):
                    outs[i] = out[None]
                left, state = left[go_on], {name: x[go_on] for name, x in state.items()}
                if not len(left):
                    break
                self.method.enter(self.model, index, state)
        return drafts, self._word(torch.cat([x for x in outs if x is not None])).tolist()

    def _pass(self, index: int, state: State, at: Tensor) -> Tensor:
        net = self.model.model
        self.traversals += 1
        view = packed(self.slots, len(net.layers), index, torch.zeros_like(at), at, at)
        h: Tensor = net.stack(state["x"][None], index, view)[0]
        return h

    def _word(self, out: Tensor) -> Tensor:
        return wide(self.model.lm_head(out)).argmax(-1)
