"""Adaptive latent CoT: a variable number of latent steps per token, causal in (token, step), without Jacobi iterations.

    x_0 = c We[id];  x_{k+1} = h_k = N(Stack(x_k; keys (t', j) with t' <= t, j <= k, of steps that token t' ran))
    g_k = sigmoid(w_r h_k + b_r);  reach_0 = 1;  a token continues while reach_k g_k >= tau and k < K
    exit mass e_k = reach_k (1 - g_k), or reach_k at its last step;  reach_{k+1} = reach_k g_k
    logits = (sum_k e_k h_k) Wo^T
    loss = CE + weight * mean of sum_{k<K} sg(p_k(target)^beta) reach_k g_k

That is the form with `target: 0.0`: the depth follows from `cost_weight`, and no value of it is a budget.  With a
target, which is the default, the gates g_k only weigh the states, and `megaponder.ponder.budget` decides who goes on
and holds the budget; there is no cost but that of the scores.  A token runs `least` steps, and one (or two) more where
the score says so.  The loss with which a token would leave at step k, from which the scores learn, is that of
sum_{j<k} e_j h_j + reach_k h_k.

All steps k of all tokens run at once, as pass k.  Known from arXiv 2602.08220: the two-dimensional causality, online
continue gates, reach threshold, exit-mass mixture, a cost weighted by the probability of the correct token, and that
at 70M a linear router, an MLP and no router at all end at much the same loss (`router`; without one g_k is 1, so that
all tokens run all steps and the last state is read out).  This project's choices (no public code): tau = 0.01, the form
of the cost, a linear router with bias +2 on the normed state; dead steps have no keys at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.config.declare import declare
from megaponder.decoding.gates import router
from megaponder.ponder.base import (
    CoreAttention,
    EntryTools,
    ExitTools,
    Flow,
    Method,
    Pass,
    Readout,
    Shape,
    depth_scaled,
    pass_count,
    register,
)
from megaponder.ponder.budget import Budgeted, lottery
from megaponder.ponder.halting import at_least, fraction, one_of, ordered, router32, starts_at


@register
class AdaptiveCot(Budgeted, Method):
    """Online gated latent steps."""

    name = "adaptive_cot"
    summary = "up to steps latent steps per token, each token stops on its own"
    rider_channels = 1  # 1.0: the token takes this step
    keeps_kv = True
    halts = True
    skips = True
    chooses = True

    @dataclass
    class Options:
        steps: int = pass_count(3)
        """K: maximum latent steps of a token; the model runs at most K + 1 passes."""
        target: float = declare(0.9, earlier=0.0)
        """Share of the K + 1 passes that a token may spend in the mean, held by a threshold that follows it; 0: the
        reach and the cost decide, which hold no budget."""
        explore: float = 0.1
        """With a target: share of training's decisions that are drawn at random, so that scores and passes learn from
        all tokens."""
        score_weight: float = 0.1
        """With a target: weight of the scores' error in the loss."""
        gate_width: int = 4
        """Inner size of the router, if it is an mlp, and with a target of the scores' MLPs, in hidden sizes."""
        ramp_start: int = 0
        """With a target: step up to which all tokens run all passes of the window."""
        ramp_end: int = 0
        """With a target: step from which on it is met."""
        threshold: float = declare(0.01, unless="target")
        """tau: a token goes on while its reach is at least this (without a target)."""
        cost_weight: float = declare(0.01, unless="target")
        """lambda: weight of the cost; more means earlier stops (without a target)."""
        cost_power: float = declare(1.0, unless="target")
        """beta: power of the correct token's probability in the cost; more means later stops (without a target)."""
        router: str = "linear"
        """What the gates g_k come from: linear, mlp (two layers), or none (they are 1)."""
        router_bias: float = 2.0
        """Initial value of the router's bias."""

        def __post_init__(self) -> None:
            for name in ("steps", "gate_width"):
                at_least(self, name, 1)
            for name in ("cost_weight", "cost_power", "score_weight"):
                at_least(self, name, 0)
            for name in ("threshold", "explore"):
                fraction(self, name)
            ordered(self, "ramp_start", "ramp_end")
            one_of(self, "router", ("linear", "mlp", "none"))

    def __init__(self, options: Any, shape: Shape):
        super().__init__(options, shape)
        self.open_window(options.steps + 1, "passes")

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        k = self.options.steps if self.window is None else self.window.most - 1
        return tuple(Pass(i, last=i == k, key_sets=i + 1) for i in range(k + 1))

    def embedding_scale(self) -> float:
        return math.sqrt(2.5 * self.shape.hidden_size)

    def initialisation(self) -> tuple[str, float]:
        return depth_scaled(self.shape, self.options.steps + 1 if self.shape.neox_recipe else 1)

    def exit_modules(self) -> dict[str, nn.Module]:
        o, made = self.options, dict[str, nn.Module]()
        if o.router != "none":
            made["router"] = starts_at(router(o.router, self.shape.hidden_size, o.gate_width), o.router_bias)
        return made | ({} if self.window is None else {"budget": self.gates()})

    def enter(
        self, p: Pass, ids_bn: Tensor, feedback: Flow | None, carry: dict[str, Tensor], tools: EntryTools
    ) -> Flow:
        if feedback is not None:
            return feedback
        rows = tools.embed(ids_bn)
        return Flow(rows, torch.ones(*rows.shape[:2], 1, device=rows.device))

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
        assert riders is not None
        kept = (*kept, core.scatter(k), core.scatter(v), riders[..., 0].detach())
        keys, values, alive = kept[0::3], kept[1::3], [a > 0.5 for a in kept[2::3]]
        return core(q, k, v) if p.index == 0 else core.merged(q, keys, values, alive), kept

    def leave(self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools) -> Flow:
        assert riders is not None
        h, alive = tools.norm(rows), riders[..., 0] > 0.5
        gate = self._gate(h, tools)
        reach = carry["reach"] if p.index else torch.ones_like(gate)
        on = reach * gate
        if self.window is None:
            go_on = on >= self.options.threshold
            right = tools.target_probability(h, alive) ** self.options.cost_power if self._costs() else 0.0
            cost = right * on * tools.valid_sb
            carry["cost"] = carry["cost"] + cost if p.index else cost
        else:
            go_on = self._by_budget(p, h, reach, alive, carry, tools)
        if self.at_random is not None and self.window is None:
            go_on = lottery(tools, 2 * p.index) < self.at_random[p.index]
        if self.forced is not None:
            go_on = self.forced > p.index + 1
            carry[f"reach{p.index}"] = on
        go_on = go_on & alive
        self._take(p, h, torch.where(go_on, reach - on, reach) * alive, alive, carry)
        carry["reach"] = torch.where(go_on, on, torch.zeros_like(on))
        carry[f"gate{p.index}"], carry[f"asked{p.index}"] = gate, alive & (tools.valid_sb > 0)
        return Flow(h, go_on.float()[..., None])

    def _gate(self, h: Tensor, tools: ExitTools) -> Tensor:
        """g_k [s, b]."""
        if self.options.router == "none":
            return torch.ones(h.shape[:2], device=h.device)
        return tools.broadcast(router32(tools.modules["router"], h)[..., 0]).sigmoid()

    def _costs(self) -> bool:
        """Whether the cost moves anything."""
        return bool(self.options.cost_weight) and self.options.router != "none"

    def _by_budget(
        self, p: Pass, h: Tensor, reach: Tensor, alive: Tensor, carry: dict[str, Tensor], tools: ExitTools
    ) -> Tensor:
        assert self.window is not None
        index = p.index + 1 - self.window.least
        if index < 0:
            return alive
        self._learn(index, h, reach, alive, carry, tools)
        decisions = self.decisions(carry, tools)
        return decisions.decide(index, alive, decisions.gates.score(index, alive, h, tools), self.at_random)

    def _learn(
        self, index: int, h: Tensor, reach: Tensor, alive: Tensor, carry: dict[str, Tensor], tools: ExitTools
    ) -> None:
        if tools.step is not None:
            out = reach.to(h.dtype)[..., None] * h
            losses = tools.target_loss(carry["out"] + out if "out" in carry else out, alive)
            self.decisions(carry, tools).learn(index, losses, alive)

    @staticmethod
    def _take(p: Pass, h: Tensor, mass: Tensor, alive: Tensor, carry: dict[str, Tensor]) -> None:
        """Add this step's contribution to the output and the depth."""
        part = mass.to(h.dtype)[..., None] * h
        carry["out"] = carry["out"] + part if p.index else part
        carry["depth"] = carry["depth"] + alive.float() if p.index else alive.float()

    def readout(
        self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools
    ) -> Readout:
        assert riders is not None
        h, alive = tools.norm(rows), riders[..., 0] > 0.5
        gates = [(carry[f"gate{i}"], carry[f"asked{i}"]) for i in range(p.index)]
        stats: dict[str, Tensor] = {}
        if self.window is not None:
            self._learn(self.window.gates, h, carry["reach"], alive, carry, tools)
            stats = self.decisions(carry, tools).stats()
        self._take(p, h, carry["reach"], alive, carry)
        weight = self.options.cost_weight if self.window is None else self.options.score_weight
        cost = weight * carry["cost"].sum() if "cost" in carry else None
        return Readout(carry["out"], cost, stats, carry["depth"], gates, self._scores(p, carry))

    def _scores(self, p: Pass, carry: dict[str, Tensor]) -> dict[int, Tensor]:
        if self.forced is None:
            return {}
        if self.window is not None:
            return {self.window.least + i: carry[f"score{i}"] for i in range(self.window.gates)}
        return {i + 1: carry[f"reach{i}"] for i in range(p.index)}

    def decides(self) -> bool:
        return True

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        h, kind = self.shape.hidden_size, self.options.router
        mlp = 2.0 * self.options.gate_width * h**2
        gate = 0.0 if p.last else {"none": 0.0, "linear": 2.0 * h, "mlp": mlp}[kind]
        decides = self.window is not None and p.index + 1 >= self.window.least and not p.last
        return gate + (mlp if decides else 0.0)

    def training_flops(self, p: Pass, vocab_size: int) -> float:
        reads = self._costs() and not p.last if self.window is None else p.index + 1 >= self.window.least
        return 2.0 * vocab_size * self.shape.hidden_size if reads else 0.0  # how good a pass is, without a gradient
