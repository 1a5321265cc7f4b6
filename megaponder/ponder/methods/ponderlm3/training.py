"""PonderLM-3: latent thoughts of which each token takes as many as a router grants it.

    a_t = W_r h_{t,0} + b_r;  s_t = softmax(a_t) over 0 .. K;  tail mass w_{t,k} = sum_{j >= k} s_{t,j}
    attention: log w_{t,k} is added to every logit of the key of latent k;  readout: sum_k s_{t,k} h_{t,k}
    decoding: token t runs latents 1 .. max{k : w_{t,k} >= tau};  loss = CE + weight * mean of sum_{k>=1} w_{t,k}

That is the form with `target: 0.0`.  Its cost answers to no budget (0.2 collapses to no latents at all), and pruning at
tau in decoding leaves rows out that training weighs.  With a target, which is the default, `megaponder.ponder.budget`
decides how many rows a token has, in training as in decoding: `least` rows, and one (or two) more where a score of
h_{t,0} says so.  Rows that a
token does not have have no keys, and a_t is -inf there, so that s_t is a softmax over the others.  The loss with which
a token would stop at row k, from which the scores learn, is that of the softmax over rows 0 .. k; the only cost is the
scores' error.

Known from arXiv 2603.02023: router on the step-0 state, log tail mass on keys, hard pruning at tau = 1e-4, exit-mass
readout.  This project's choices (no public code): a linear router with b_K = +2; the bias in a pass comes from the
logits of the pass before (the router's input exists only after the last layer); it holds for the token's own row too;
after pruning the exit masses of the rows that are left sum to 1 (which at tau changes them by 1e-4, and lets larger
thresholds and single rows be compared); the cost is the expected number of latents, or what exceeds `target_depth` on a
sequence's mean.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.config.declare import declare
from megaponder.ponder.base import (
    CoreAttention,
    EntryTools,
    ExitTools,
    Flow,
    Pass,
    Readout,
    Shape,
    interleave,
    pass_count,
    register,
    slot,
)
from megaponder.ponder.budget import Budgeted, Decisions
from megaponder.ponder.halting import at_least, fraction, linear32, ordered, ramp
from megaponder.ponder.methods.latents.training import LatentMethod, LatentOptions

DEAD = -1e4
"""Logit of what does not exist: exp of it is 0, and it crosses BF16."""


def log_tails(a: Tensor) -> Tensor:
    """log of the tail masses w_k = sum_{j >= k} softmax(a)_j; the first is exactly 0."""
    tails = torch.logcumsumexp(a.flip(-1), dim=-1).flip(-1)
    return tails - tails[..., :1]


@register
class PonderLM3(Budgeted, LatentMethod):
    """Latent thoughts with a router."""

    name = "ponderlm3"
    summary = "latent thoughts, as many for each token as its router grants"
    rider_channels = 1  # log tail mass of the row, added to its key's logits
    halts = True
    weighs = True
    stats = ("expected_depth",)

    @dataclass
    class Options(LatentOptions):
        latents: int = pass_count(3)
        """K: the most latent thoughts of a token."""
        target: float = declare(0.9, earlier=0.0)
        """Share of the K + 1 rows that a token may spend in the mean, held by a threshold that follows it; 0: the
        router and the cost decide, which hold no budget."""
        explore: float = 0.1
        """With a target: share of training's decisions that are drawn at random, so that scores and passes learn from
        all tokens."""
        score_weight: float = 0.1
        """With a target: weight of the scores' error in the loss."""
        gate_width: int = 4
        """With a target: inner size of the scores' MLPs, in hidden sizes."""
        threshold: float = declare(1e-4, unless="target")
        """tau: decoding runs the latents whose tail mass is at least this (without a target)."""
        cost_weight: float = declare(0.01, unless="target")
        """Weight of the expected number of latents in the loss (without a target)."""
        target_depth: float = declare(0.0, unless="target")
        """Penalise only what a sequence's mean number of latents exceeds this by; 0: penalise all (without a
        target)."""
        ramp_start: int = 0
        """Step up to which all tokens run all rows of the window; without a target, at which the cost leaves 0."""
        ramp_end: int = 0
        """Step from which on the target is met, or the cost has its full weight."""
        router_bias: float = 2.0
        """Start of the router's bias for the full number of latents."""

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("cost_weight", "target_depth", "score_weight"):
                at_least(self, name, 0)
            at_least(self, "gate_width", 1)
            for name in ("threshold", "explore"):
                fraction(self, name)
            ordered(self, "ramp_start", "ramp_end")

    def __init__(self, options: Any, shape: Shape):
        super().__init__(options, shape)
        self.open_window(options.latents + 1, "rows")
        self.chooses = self.window is not None  # otherwise every row runs and is weighed, in training at least
        if self.window is not None:
            self.options = copy.copy(options)
            self.options.latents = self.window.most - 1

    def max_depth(self) -> int:
        return int(self.options.latents) + 1

    def exit_modules(self) -> dict[str, nn.Module]:
        router = nn.Linear(self.shape.hidden_size, self.options.latents + 1)
        nn.init.zeros_(router.weight)
        nn.init.zeros_(router.bias)
        with torch.no_grad():
            router.bias[-1] = self.options.router_bias
        return {"router": router} | ({} if self.window is None else {"budget": self.gates()})

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        rows = super().enter(p, ids_bn, feedback, carry, tools).rows
        nothing = torch.zeros(*carry["embedding"].shape[:2], 1, device=rows.device)
        if feedback is None:
            return Flow(rows, nothing)
        assert feedback.riders is not None
        latents = p.slots - 1
        return Flow(rows, interleave([nothing, *(slot(feedback.riders, latents, i) for i in range(latents))]))

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
        if p.index == 0:
            return core(q, k, v), ()
        assert riders is not None
        return core(q, k, v, key_bias=riders[..., 0]), ()

    def _route(self, p: Pass, h: Tensor, tools: ExitTools) -> Tensor:
        """Router logits [n, b, K + 1] from the states of slot 0."""
        slots = len(p.reads) if p.reads is not None else p.slots
        return tools.broadcast(linear32(tools.modules["router"], slot(h, slots, 0)))

    def _rows(
        self, p: Pass, h: Tensor, carry: dict[str, Tensor], tools: ExitTools
    ) -> tuple[Tensor, Tensor | None, Decisions | None]:
        """Router logits [n, b, K + 1], which rows a token has (None: all, weighed), and how that was decided.

        Every pass decides anew: `carry` is of this pass alone.
        """
        a = self._route(p, h, tools)
        if self.window is None and self.forced is None:
            return a, log_tails(a).exp() >= self.options.threshold if self.hard else None, None
        first = slot(h, len(p.reads) if p.reads is not None else p.slots, 0)
        row, decisions = torch.ones_like(a[..., 0], dtype=torch.bool), None
        alive = [row]
        if self.window is not None:
            decisions = self.decisions(carry, tools)
        for k in range(1, a.shape[-1]):
            if self.window is not None and k >= self.window.least and decisions is not None:
                index = k - self.window.least
                score = decisions.gates.score(index, row, first, tools)
                row = decisions.decide(index, row, score, self.at_random)
            if self.forced is not None:
                row = torch.ones_like(row) & (self.forced > k)
            alive.append(row)
        there = torch.stack(alive, dim=-1)
        return a if self.window is None else a.masked_fill(~there, DEAD), there, decisions

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        h = tools.norm(rows)
        self._watch(p, h, carry, tools)
        a, alive, _ = self._rows(p, h, {}, tools)
        log_w = log_tails(a)
        if alive is not None:
            log_w = log_w.masked_fill(~alive, DEAD)
        return Flow(h, log_w[..., 1 : p.feedback_slots + 1].transpose(1, 2).flatten(0, 1)[..., None])

    def readout(
        self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools
    ) -> Readout:
        h, kept = tools.norm(rows), dict[str, Tensor]()
        a, alive, decisions = self._rows(p, h, kept, tools)
        s, w = (a if alive is None else a.masked_fill(~alive, DEAD)).softmax(-1), log_tails(a).exp()[..., 1:]
        hidden = self._mixture(p, h, s)
        # w falls with k: the count is the largest k
        depth = 1.0 + (w.detach() >= self.options.threshold).sum(-1) if alive is None else alive.float().sum(-1)
        expected = w.sum(-1)
        stats = {"expected_depth": ((1.0 + expected) * tools.valid_sb).sum(), **self._residuals(carry)}
        gates = [(w[..., k], torch.ones_like(depth, dtype=torch.bool)) for k in range(w.shape[-1])]
        if decisions is None:
            scores = {} if self.forced is None else {k + 1: w[..., k].detach() for k in range(w.shape[-1])}
            return Readout(hidden, self._cost(expected, tools), stats, depth, gates, scores)
        assert alive is not None and self.window is not None
        cost = self._scores_error(p, h, a, alive, decisions) if tools.step is not None else None
        scores = {}
        if self.forced is not None:
            scores = {self.window.least + i: kept[f"score{i}"] for i in range(self.window.gates)}
        return Readout(hidden, cost, stats | decisions.stats(), depth, gates, scores)

    @staticmethod
    def _mixture(p: Pass, h: Tensor, s: Tensor) -> Tensor:
        return torch.stack([slot(h, p.slots, k) * s[..., k, None].to(h.dtype) for k in range(p.slots)]).sum(0)

    def _scores_error(self, p: Pass, h: Tensor, a: Tensor, alive: Tensor, decisions: Decisions) -> Tensor:
        """Losses of tokens had they stopped at each row of the window, and the error of the scores."""
        assert self.window is not None
        with torch.no_grad():
            for index in range(self.window.gates + 1):
                last = self.window.least - 1 + index
                s = torch.cat([a[..., : last + 1].softmax(-1), torch.zeros_like(a[..., last + 1 :])], dim=-1)
                losses = decisions.tools.target_loss(self._mixture(p, h, s), alive[..., last])
                with torch.enable_grad():
                    decisions.learn(index, losses, alive[..., last])
        return self.options.score_weight * decisions.carry["cost"]

    def _cost(self, expected: Tensor, tools: ExitTools) -> Tensor:
        valid = tools.valid_sb
        excess = (expected - self.options.target_depth) * valid
        if self.options.target_depth:
            # relu of a sequence's mean, times its tokens; whole sequences decide, so no layout matters
            excess = excess * (tools.total(excess) > 0)
        weight = self.options.cost_weight * ramp(tools.step, self.options.ramp_start, self.options.ramp_end)
        return weight * excess.sum()

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        return 2.0 * self.shape.hidden_size * (self.options.latents + 1)
