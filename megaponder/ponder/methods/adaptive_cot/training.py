"""Adaptive latent CoT: a variable number of latent steps per token, causal in (token, step), without Jacobi iterations.

    x_0 = c We[id];  x_{k+1} = h_k = N(Stack(x_k; keys (t', j) with t' <= t, j <= k, of steps that token t' ran))
    g_k = sigmoid(w_r h_k + b_r);  reach_0 = 1;  a token goes on while reach_k g_k >= tau and k < K
    exit mass e_k = reach_k (1 - g_k), or reach_k at its last step;  reach_{k+1} = reach_k g_k
    logits = (sum_k e_k h_k) Wo^T
    loss = CE + weight * mean of sum_{k<K} sg(p_k(target)^beta) reach_k g_k

All steps k of all tokens run at once, as pass k.  Known from arXiv 2602.08220: the two-dimensional causality, online
continue gates, reach threshold, exit-mass mixture, a cost weighted by the probability of the right token.  This
project's choices (no public code): tau = 0.01, the form of the cost, a linear router with bias +2 on the normed state;
dead steps have no keys at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaponder.ponder.base import (
    CoreAttention,
    EntryTools,
    ExitTools,
    Flow,
    Method,
    Pass,
    Readout,
    depth_scaled,
    pass_count,
    register,
)
from megaponder.ponder.halting import at_least, fraction, linear32


@register
class AdaptiveCot(Method):
    """Online gated latent steps."""

    name = "adaptive_cot"
    summary = "up to steps latent steps per token, each token stops on its own"
    rider_channels = 1  # 1.0: the token takes this step
    keeps_kv = True
    halts = True
    skips = True

    @dataclass
    class Options:
        steps: int = pass_count(3)
        """K: the most latent steps of a token; the model runs at most K + 1 passes."""
        threshold: float = 0.01
        """tau: a token goes on while its reach is at least this."""
        cost_weight: float = 0.01
        """lambda: weight of the cost; more means earlier stops."""
        cost_power: float = 1.0
        """beta: power of the right token's probability in the cost; more means later stops."""
        router_bias: float = 2.0
        """Start of the router's bias."""

        def __post_init__(self) -> None:
            at_least(self, "steps", 1)
            for name in ("cost_weight", "cost_power"):
                at_least(self, name, 0)
            fraction(self, "threshold")

    def passes(self, seed: int, step: int | None) -> tuple[Pass, ...]:
        k = self.options.steps
        return tuple(Pass(i, last=i == k, key_sets=i + 1) for i in range(k + 1))

    def embedding_scale(self) -> float:
        return math.sqrt(2.5 * self.shape.hidden_size)

    def initialisation(self) -> tuple[str, float]:
        return depth_scaled(self.shape, self.options.steps + 1 if self.shape.neox_recipe else 1)

    def exit_modules(self) -> dict[str, nn.Module]:
        router = nn.Linear(self.shape.hidden_size, 1)
        nn.init.zeros_(router.weight)
        nn.init.constant_(router.bias, self.options.router_bias)
        return {"router": router}

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
        gate = tools.broadcast(linear32(tools.modules["router"], h)[..., 0]).sigmoid()
        reach = carry["reach"] if p.index else torch.ones_like(gate)
        on = reach * gate
        go_on = alive & (on >= self.options.threshold)
        self._take(p, h, torch.where(go_on, reach - on, reach) * alive, alive, carry)
        right = tools.target_probability(h, alive) ** self.options.cost_power if self.options.cost_weight else 0.0
        cost = right * on * tools.valid_sb
        carry["cost"] = carry["cost"] + cost if p.index else cost
        carry["reach"] = torch.where(go_on, on, torch.zeros_like(on))
        carry[f"gate{p.index}"], carry[f"asked{p.index}"] = gate, alive & (tools.valid_sb > 0)
        return Flow(h, go_on.float()[..., None])

    @staticmethod
    def _take(p: Pass, h: Tensor, mass: Tensor, alive: Tensor, carry: dict[str, Tensor]) -> None:
        """Add this step's share to the output and to the depth."""
        part = mass.to(h.dtype)[..., None] * h
        carry["out"] = carry["out"] + part if p.index else part
        carry["depth"] = carry["depth"] + alive.float() if p.index else alive.float()

    def readout(
        self, p: Pass, rows: Tensor, riders: Tensor | None, carry: dict[str, Tensor], tools: ExitTools
    ) -> Readout:
        assert riders is not None
        self._take(p, tools.norm(rows), carry["reach"], riders[..., 0] > 0.5, carry)
        gates = [(carry[f"gate{i}"], carry[f"asked{i}"]) for i in range(self.options.steps)]
        return Readout(carry["out"], self.options.cost_weight * carry["cost"].sum(), depth=carry["depth"], gates=gates)

    def decides(self) -> bool:
        return True

    def extra_flops(self, p: Pass, vocab_size: int) -> float:
        if p.last:
            return 0.0
        h = self.shape.hidden_size
        return 2.0 * h + (2.0 * vocab_size * h if self.options.cost_weight else 0.0)
