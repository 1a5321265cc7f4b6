"""Huginn: a prelude embeds the tokens, a core refines a random state again and again, a coda reads it out.

    e = Prelude(c We[ids]),  s_0 = c sigma z,  s_i = Core(Wa [s_{i-1} ; e])  (r times),  logits = N(Coda(N(s_r))) Wo^T

sigma = sqrt(2 / (5 H)); z is normal, cut off at 3; Wa [H, 2H]; both norms have the same weight.  Training draws r
(log-normal Poisson around `recurrence`), and only the last `kept` recurrences have gradients: the prelude is trained
through what they read of e, and s_{r-kept} is a constant.  Evaluation runs `recurrence` of them.

Published: all of the above, with one draw of r a micro-batch and without a bound.  Here: one draw a step, at most
`draw_to`; z is a function of seed, step, position and token, so that every layout has the same one, and evaluation and
decoding have one of their own.  The blocks are those of the backbone: the published ones norm the stream.
Source: arXiv 2502.05171 and its official code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.config.declare import declare
from megaponder.decoding.kv_budget import RULES, budget_mistake
from megaponder.errors import ConfigError
from megaponder.ponder.base import EntryTools, ExitTools, Flow, Method, Pass, Shape, pass_count, register
from megaponder.ponder.drawn import DrawnOptions
from megaponder.ponder.halting import as_decoded, at_least, one_of, refuse

from .exits import EXITS, exit_mistake


def layer_count(default: int) -> int:
    """An option that counts layers of the prelude or the coda.  A run that goes on keeps it, since it says what each
    layer has learned to do; loaded weights may be split anew, with a warning."""
    return declare(default, ge=0, le=1000, resume="refused", load="warned")


@dataclass
class ReadingOptions:
    """How a core is run in decoding."""

    exit_below: float = 0.0
    """Decoding stops once `exit_by` is below this for every new token; 0: never."""
    exit_by: str = "change"
    """What a recurrence must no longer change: change (the state, by this share; Huginn: 0.03), cosine (one minus that
    of the states; 1e-3), entropy (of the next token, in nats; 1e-3), divergence (KL between the distributions before
    and after; 1e-3), min_p (the same, without telling unlikely tokens apart; 1e-5), or likeliest (the likeliest token,
    over `exit_below` recurrences; 5).  The last four run coda and head after every recurrence."""
    kv_budget: int = pass_count(0)
    """Decoding keeps the keys and values of so many recurrences of a token, which later tokens read; 0: of all.  A
    prompt that runs at once is computed as without, and keeps as many."""
    kv_rule: str = "ring"
    """With `kv_budget` recurrences take turns (ring: i mod `kv_budget`, so that the newest stay; Huginn's compress-s),
    or the first ones keep their own and all others share the last (anchor; compress-anchor)."""

    def check_reading(self) -> None:
        """ConfigError for values that do not exist."""
        one_of(self, "exit_by", EXITS)
        one_of(self, "kv_rule", RULES)
        as_decoded(self, "exit_below", "kv_budget")

    def check_read(self, passes: int) -> None:
        """The same for options without effect where a token runs so many passes (`Method.check_run`)."""
        refuse(exit_mistake(self.exit_by, self.exit_below, self.exit_by != ReadingOptions.exit_by))
        refuse(budget_mistake(self.kv_budget, passes, self.kv_rule))


@dataclass
class RecurrentOptions(ReadingOptions, DrawnOptions):
    """Options of the methods that repeat the middle of the stack."""

    draw: str = "lognormal"
    """How training finds the number of recurrences of a step: fixed, uniform (from draw_from to draw_to), poisson, or
    lognormal (Huginn's: one more than Poisson around a log-normal mean)."""
    prelude: int = layer_count(2)
    """First layers, which run once."""
    coda: int = layer_count(2)
    """Last layers, which run once; the layers between are the core."""
    recurrence: int = pass_count(32)
    """Recurrences of the core in evaluation, and around which training draws."""
    kept: int = pass_count(8)
    """Last recurrences that have gradients."""
    noise_seed: int = 0
    """Of the first state."""

    def __post_init__(self) -> None:
        for name in ("recurrence", "kept"):
            at_least(self, name, 1)
        self.check_reading()
        self.check_draw(self.recurrence)


def check_kept(options: Any, most: int) -> None:
    """ConfigError for a `kept` above the most recurrences of a step, unless it is the default."""
    if options.kept > most and options.kept != type(options).kept:
        rule = f"it must be at most {most}, the most recurrences of a step"
        raise ConfigError("ponder.options.kept", options.kept, rule, f"the nearest is {most}")


class Recurrent(Method):
    """Prelude, a core that is repeated from a random state with the prelude's output mixed in, and coda."""

    def __init__(self, options: Any, shape: Shape):
        super().__init__(options, shape)
        o, layers = options, shape.num_layers
        self.core = o.prelude, layers - o.coda
        if o.prelude + o.coda >= layers:
            raise ConfigError(
                "ponder.options.prelude",
                o.prelude,
                f"with coda = {o.coda} it leaves none of the {layers} layers for the core",
                f"use at most {layers - 1} together",
            )

    def check_run(self) -> None:
        o = self.options
        o.check_drawn("recurrence")
        o.check_read(o.recurrence)
        check_kept(o, o.most(o.recurrence))

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        return self._plan(self.options.number(self.options.recurrence, seed, step))

    def longest(self, seed: int) -> tuple[Pass, ...]:
        return self._plan(self.options.most(self.options.recurrence))

    def _plan(self, r: int) -> tuple[Pass, ...]:
        assert self.core is not None
        begin, end = self.core
        free, last = r - self.options.kept, r - 1
        return tuple(
            Pass(i, i == last, layers=(begin if i else 0, self.shape.num_layers if i == last else end), grad=i >= free)
            for i in range(r)
        )

    def state_std(self) -> float:
        """Standard deviation of the first state, before it is cut off."""
        raise NotImplementedError

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        return Flow(tools.embed(ids_bn)) if feedback is None else feedback

    def into_core(self, p: Pass, rows: Tensor, carry: dict[str, Tensor], tools: EntryTools) -> Tensor:
        state = rows
        if p.index == 0:
            carry["embedded"] = rows
            state = (tools.noise(self.options.noise_seed) * self.state_std()).to(rows.dtype)
        return self.mixed(state, carry["embedded"], tools)

    def mixed(self, state: Tensor, embedded: Tensor, tools: EntryTools) -> Tensor:
        """Input of the core from its last state and the prelude's output."""
        out: Tensor = tools.modules["adapter"](torch.cat([state, embedded], dim=-1))
        return out

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        return Flow(rows)

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        return 4.0 * self.shape.hidden_size**2


def sigma(hidden_size: int) -> float:
    """The papers' standard deviation of matrices."""
    return math.sqrt(2 / (5 * hidden_size))


@register
class Huginn(Recurrent):
    """Recurrent depth from a random state."""

    name = "huginn"
    summary = "a prelude, a core that is repeated from a random state, and a coda"
    scales_up = True

    @dataclass
    class Options(RecurrentOptions):
        pass

    def embedding_scale(self) -> float:
        return math.sqrt(self.shape.hidden_size)

    def initialisation(self) -> tuple[str, float]:
        o, layers = self.options, self.shape.num_layers
        depth = o.prelude + o.coda + (layers - o.prelude - o.coda) * o.recurrence
        return "trunc_normal", (2 * depth) ** -0.5

    def state_std(self) -> float:
        return self.embedding_scale() * sigma(self.shape.hidden_size)

    def entry_modules(self) -> dict[str, nn.Module]:
        h = self.shape.hidden_size
        adapter, std = nn.Linear(2 * h, h, bias=False), sigma(h)
        if not adapter.weight.is_meta:  # which has no values to draw again
            nn.init.trunc_normal_(adapter.weight, std=std, a=-3 * std, b=3 * std)
        return {"adapter": adapter}

    def into_coda(self, p: Pass, rows: Tensor, carry: dict[str, Tensor], tools: ExitTools) -> Tensor:
        return tools.norm(rows)
