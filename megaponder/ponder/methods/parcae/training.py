"""Parcae: recurrent depth whose injection cannot amplify the state, and a depth of its own for every sequence.

    e = B N(Prelude(We[ids])),  s_0 = sigma z,  s_i = Core(a s_{i-1} + dt e)  (r times),  logits = N(Coda(C s_r)) We^T
    dt = softplus(b),  a = exp(-dt exp(A)) in (0, 1), for each channel

sigma = sqrt(2 / (5 H)); z is normal, cut off at 3.  In training every sequence draws its number of recurrences,
r = Poisson(`recurrence`), at least 1; the last `kept` have gradients.  Every step runs `draw_to` recurrences, and a
sequence with fewer starts as many later: until then its rows are computed and thrown away, as published.

With `value_embeddings` the layers L - 1, L - 3, ... (counted without repetition) add 2 sigmoid(G y[:32]) T[ids] to
their values: y is the layer's normed input, G has a row for each head, and T is a table of the layer's own.

Published: all of the above, where a step runs as many recurrences as its deepest sequence needs.  Here: r is at most
`draw_to`, and a function of seed, step and the sequence's tokens, so that every layout draws the same; G starts at 0
(T at normal numbers, as published).  The published blocks have value embeddings, `qk_norm: rotated`,
`rotary_pairs: adjacent` and `activation: relu2` (halved: fold 1/2 into the weights); B and C are not decayed there, and
blocks start orthogonal with zero output projections.
Source: arXiv 2604.12946 and its official code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.config.declare import declare
from megaponder.ponder.base import CoreAttention, EntryTools, ExitTools, Pass, pass_count, register
from megaponder.ponder.drawn import reaches
from megaponder.ponder.halting import at_least
from megaponder.ponder.methods.huginn.training import ReadingOptions, Recurrent, check_kept, layer_count, sigma

from .injection import GATED, Injection, Values, has_values


@register
class Parcae(Recurrent):
    """Recurrent depth of every sequence, with a stable injection."""

    name = "parcae"
    summary = "recurrent depth with an injection that cannot diverge, and a depth of its own for every sequence"

    @dataclass
    class Options(ReadingOptions):
        prelude: int = layer_count(2)
        """First layers, which run once."""
        coda: int = layer_count(2)
        """Last layers, which run once; the layers between are the core."""
        recurrence: int = pass_count(8)
        """Recurrences of the core in evaluation, and the mean of what a sequence draws in training."""
        draw_to: int = pass_count(16)
        """Most recurrences that a sequence draws: every training step runs as many; 0: nothing is drawn, every sequence
        runs `recurrence` of them."""
        kept: int = pass_count(4)
        """Last recurrences that have gradients."""
        noise_seed: int = 0
        """Of the first state and of the depths."""
        value_embeddings: bool = declare(False, resume="refused", load="free")
        """Every other layer, the last included, adds to its values a row of a table of its own for each token."""

        def __post_init__(self) -> None:
            for name, least in (("recurrence", 1), ("kept", 1), ("draw_to", 0)):
                at_least(self, name, least)
            self.check_reading()

    def check_run(self) -> None:
        o = self.options
        reaches(o.draw_to, "recurrence", o.recurrence)
        o.check_read(o.recurrence)
        check_kept(o, self.longest_run())

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        return self._plan(self.options.recurrence if step is None else self.longest_run())

    def longest(self, seed: int) -> tuple[Pass, ...]:
        return self._plan(self.longest_run())

    def longest_run(self) -> int:
        """Recurrences of a training step."""
        return int(self.options.draw_to or self.options.recurrence)

    def state_std(self) -> float:
        return sigma(self.shape.hidden_size)

    def entry_modules(self) -> dict[str, nn.Module]:
        return {"injection": Injection(self.shape.hidden_size)}

    def layer_modules(self, layer: int) -> dict[str, nn.Module]:
        s = self.shape
        if not (self.options.value_embeddings and has_values(layer, s.num_layers)):
            return {}
        return {"value": Values(s.vocab_size, s.num_kv_heads, s.head_size)}

    def attend(
        self,
        p: Pass,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        riders: Tensor | None,
        kept: tuple[Tensor, ...],
        core: CoreAttention,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if "value" in core.modules:
            v = v + core.modules["value"](core.ids, core.inputs(GATED), core.groups)
        return core(q, k, v), ()

    def exit_modules(self) -> dict[str, nn.Module]:
        h = self.shape.hidden_size
        c = nn.Linear(h, h, bias=False)
        nn.init.orthogonal_(c.weight, gain=math.sqrt(2 / 5))
        return {"C": c}

    def into_core(self, p: Pass, rows: Tensor, carry: dict[str, Tensor], tools: EntryTools) -> Tensor:
        injection: Any = tools.modules["injection"]
        if p.index == 0:
            carry["embedded"], state = injection.prepared(rows), self._start(rows, tools)
        else:
            u = tools.uniform(self.options.noise_seed) if self.options.draw_to else None
            state = rows
            if u is not None:
                waits = p.index + poisson(self.options.recurrence, u, self.options.draw_to) <= self.options.draw_to
                state = torch.where(waits[..., None], self._start(rows, tools), rows)
        out: Tensor = injection(state, carry["embedded"])
        return out

    def _start(self, rows: Tensor, tools: EntryTools) -> Tensor:
        return (tools.noise(self.options.noise_seed) * self.state_std()).to(rows.dtype)

    def into_coda(self, p: Pass, rows: Tensor, carry: dict[str, Tensor], tools: ExitTools) -> Tensor:
        out: Tensor = tools.modules["C"](rows)
        return out

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        s, (begin, end) = self.shape, p.layers or (0, self.shape.num_layers)
        gates = (
            sum(has_values(layer, s.num_layers) for layer in range(begin, end)) if self.options.value_embeddings else 0
        )
        own = 2.0 * s.hidden_size**2 * ((p.index == 0) + p.last)
        return own + gates * s.num_kv_heads * (2.0 * GATED + 2 * s.head_size)


def poisson(mean: float, u: Tensor, most: int) -> Tensor:
    """Poisson numbers from 1 to `most` whose distribution function first exceeds u, one for each u; on the device."""
    k = torch.arange(most, device=u.device)
    below = torch.exp(k * math.log(mean) - mean - torch.lgamma(k + 1.0)).cumsum(0)  # P(number <= k)
    return (u[..., None] >= below).sum(-1).clamp(min=1)
