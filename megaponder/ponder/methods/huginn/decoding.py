"""Decoding of Huginn."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaponder.decoding.backbone import wide
from megaponder.decoding.kv_budget import RULES, budget_mistake, entry_of
from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.noise import token_noise
from megaponder.decoding.passes import Run
from megaponder.decoding.ranges import RANGES, check, refuse, unknown

from .exits import EXITS, exit_mistake

LIKELY = 0.1
"""`min_p` tells tokens apart that are at least this likely, compared with the likeliest."""


class Exit:
    """Whether the newest recurrence changed anything for the new tokens, by one of Huginn's criteria."""

    def __init__(self, options: dict[str, Any], real: Tensor):
        self.by, self.below, self.real = options["exit_by"], options["exit_below"], real
        self.before: Tensor | None = None
        self.same = torch.zeros_like(real, dtype=torch.long)

    @property
    def reads(self) -> bool:
        """It needs the logits of every recurrence."""
        return bool(self.below) and self.by not in ("change", "cosine")

    def of_state(self, before: Tensor, state: Tensor) -> bool:
        """By the states [b, n, H] before and after."""
        if not self.below or self.reads:
            return False
        old, new = wide(before), wide(state)
        if self.by == "cosine":
            return self._all(1 - F.cosine_similarity(new, old, dim=-1) < self.below)
        return self._all((new - old).norm(dim=-1) / new.norm(dim=-1) < self.below)

    def of_logits(self, logits: Tensor) -> bool:
        """By the logits [b, n, V] after each recurrence, called in order."""
        if self.by == "likeliest":
            now = logits.argmax(-1)
            self.same = self.same * 0 if self.before is None else torch.where(now == self.before, self.same + 1, 0)
            self.before = now
            return self._all(self.same >= self.below)
        old, new = self.before, wide(logits).log_softmax(-1)
        if self.by == "min_p":
            likely = new >= new.amax(-1, keepdim=True) + math.log(LIKELY)
            new = new.masked_fill(~likely, -math.log(new.shape[-1])).log_softmax(-1)
        self.before = new
        if old is None:
            return False
        if self.by in ("divergence", "min_p"):
            return self._all((old.exp() * (old - new)).sum(-1) < self.below)
        return self._all(((new.exp() * new).sum(-1) - (old.exp() * old).sum(-1)).abs() < self.below)

    def _all(self, done: Tensor) -> bool:
        return bool(done[self.real].all())


DECODING = {"exit_below": 0.0, "exit_by": "change", "kv_budget": 0, "kv_rule": "ring"}
"""Options of decoding alone, and their defaults."""


class Recurrent(DecodingMethod):
    """Prelude, a core that is repeated from a random state, and coda."""

    needs_ids = True  # they seed the noise
    why_not_batched = "its first and last layers run once a token, and those between several times"
    training_only: ClassVar[tuple[str, ...]] = ("draw", "draw_from", "draw_to", "grow_steps", "grow", "kept")
    arguments = ("passes", "exit_below", "exit_by", "kv_budget", "kv_rule")
    as_trained = {"exit_below": 0.0, "kv_budget": 0}

    def using(self, given: dict[str, Any]) -> Recurrent:
        made, told = copy.copy(self), {name: value for name, value in given.items() if value is not None}
        for name in RANGES.keys() & told.keys():
            check(name, told[name])
        refuse(unknown("exit_by", told.get("exit_by", "change"), EXITS))
        refuse(unknown("kv_rule", told.get("kv_rule", RULES[0]), RULES))
        if "passes" in told:
            told["recurrence"] = int(told.pop("passes"))
        made.options = o = {**self.options, **told}
        if told.keys() & {"exit_by", "exit_below"}:
            refuse(exit_mistake(o["exit_by"], o["exit_below"], "exit_by" in told))
        if told.keys() & {"kv_budget", "kv_rule"}:
            refuse(budget_mistake(o["kv_budget"], o["recurrence"], told.get("kv_rule", RULES[0])))
        return made

    def entry_modules(self) -> dict[str, nn.Module]:
        return {"adapter": nn.Linear(2 * self.config.hidden_size, self.config.hidden_size, bias=False)}

    def state_scale(self) -> float:
        """Of the first state, over the papers' standard deviation of matrices."""
        return 1.0

    def embedded(self, model: Any, e: Tensor) -> Tensor:
        """What each recurrence reads of the prelude's output."""
        return e

    def mixed(self, model: Any, state: Tensor, embedded: Tensor) -> Tensor:
        """Input of the core."""
        out: Tensor = model.method_entry["adapter"](torch.cat([state, embedded], dim=-1))
        return out

    def between(self, model: Any, state: Tensor) -> Tensor:
        """What the coda reads of the last state."""
        return state

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net, o = model.model, self.options
        layers, r = len(net.layers), o["recurrence"]
        begin, end = o["prelude"], layers - o["coda"]
        core, coda, ends = range(begin, end), range(end, layers), run.entry(0)  # prelude and coda run once: entry 0

        def read() -> Tensor:
            return net.norm(net.stack(self.between(model, state), 0, ends, part=coda))

        e = self.embedded(model, net.stack(net.embed(net.words(ids), run.positions), 0, ends, part=range(begin)))
        std = math.sqrt(2 / (5 * e.shape[-1])) * self.state_scale()
        state = (std * token_noise(ids, run.positions, o["noise_seed"], -1, e.shape[-1])).to(e.dtype)
        leaves, out = Exit(o, run.real), None
        for index in range(r):
            at = entry_of(index, o["kv_budget"], o["kv_rule"])
            before, state = state, net.stack(self.mixed(model, state, e), at, run.entry(at, core), part=core)
            if leaves.reads and index < r - 1:
                out = read()
                if leaves.of_logits(model.lm_head(out)):
                    break
                out = None
            if leaves.of_state(before, state):
                break
        run.depth = torch.full_like(ids, index + 1)
        return read() if out is None else out


class Huginn(Recurrent):
    """A token runs the prelude once, the core `recurrence` times and the coda once. Keys and values of each recurrence
    are cached by themselves, or with `kv_budget` those of so many recurrences. `passes` is another number of
    recurrences. With `exit_below` the core stops once a recurrence changes nothing for any new token, by the criterion
    `exit_by`; in the recurrences that are left out, later tokens see the keys and values of the last one that ran,
    which is an approximation."""

    name = "huginn"
    defaults = {"prelude": 2, "coda": 2, "recurrence": 32, "noise_seed": 0, **DECODING}

    def state_scale(self) -> float:
        return math.sqrt(self.config.hidden_size)

    def between(self, model: Any, state: Tensor) -> Tensor:
        return model.model.norm(state)
