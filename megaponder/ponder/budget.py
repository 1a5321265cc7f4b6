"""Budgets that hold: scores that are learned from what a pass brings, and one threshold that follows the budget.

    b = l_j - l_{j+1}: what one more pass took off the token's loss, of the rows that ran it, without gradient
    g = (8 / I) (w2 relu((W1 sg(h) + b1) / sqrt(H)) + b2): the score
    it is trained by (g - clamp(b, -3, 3) / sigma)^2;   sigma^2: moving mean of b^2
    a token in the window goes on while g >= theta
    theta = mean(g) + std(g) (Phi^-1(1 - p) + c),   c <- c + 0.2 (depth - budget)

p is the share of decisions that the budget lets go on, `depth` the mean number of passes.  The threshold is the only
part that knows the budget, and no gradient passes through it, so no gate can saturate: one that went too far comes
back.  It changes once a step, from sums over the global batch, and is a tensor beside the scores' weights: in
checkpoints and exports, and read by captured passes where it lies.

The factors 8 / I (I: width of the MLP) and 1 / sqrt(H) make the scores move by about 3 learning rates a step, whatever
the width: theta can only follow scores that move by less in a step than they differ between tokens.

In training a share `explore` of the decisions is drawn at random instead, with probability p: from step, position and
token, so that every layout draws the same.  Without such draws the scores would never learn what they have missed, and
passes would be trained at the tokens that take them alone.  At 1 all are drawn: the model is trained as by random
halting, and only evaluation and decoding, where no decision is drawn, follow the scores.

theta * sigma is the price of a pass in nats: what the last pass that is granted brings.  Below 0 the budget is larger
than what is useful.

The same threshold follows any other score: `confident_ponderlm` has one that is not learned (`Budgeted.learns`), and
then there is no price.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.window import Window, scales, window
from megaponder.errors import ConfigError
from megaponder.ponder.base import ExitTools, Shape
from megaponder.ponder.halting import linear32, ramp

GAIN = 0.2
"""How far c moves, in standard deviations of the score, when the depth is wrong by 1."""
FARTHEST = 1.5
"""Limit of c: after a time in which no threshold could have held the budget, c comes back soon."""
RATE = 0.3
"""Weight of the newest step in the moving mean and variance of the scores."""
SLOW = 0.02
"""Weight of the newest step in the moving mean of b^2."""
LARGEST = 3.0
"""Benefits are cut off here, in nats."""
THETA, MEAN, VARIANCE, CORRECTION, SIGMA2, SHARE, STEPS = range(7)
SUMS = ("seen", "score", "score_sq", "ran", "benefit_sq")
PRICE = "price_of_a_pass"


def stat_names(window: Window, learns: bool) -> tuple[str, ...]:
    """Statistics of a method with a budget; those with a slash are for theta alone."""
    gates = (f"{name}{i}" for i in range(window.gates) for name in ("asked", "went"))
    return (*(f"budget/{name}" for name in (*SUMS, *gates)), *((PRICE,) if learns else ()))


class Threshold(nn.Module):
    """The threshold, and what it follows.

    `state` (FP32, no gradient): theta, mean and variance of the scores, c, sigma^2, p, number of updates.
    """

    def __init__(self, share: float):
        super().__init__()
        theta = -(2.0**20) if share >= 1 else 0.0
        self.state = nn.Parameter(torch.tensor([theta, 0.0, 0.0, 0.0, 1.0, share, 0.0]), requires_grad=False)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """The threshold stays FP32, whatever the weights become."""
        before = self.state.detach().clone()
        super()._apply(fn, recurse)
        self.state.data = before.to(self.state.device)
        return self

    @property
    def theta(self) -> Tensor:
        return self.state[THETA]

    @property
    def sigma(self) -> Tensor:
        return self.state[SIGMA2].sqrt()

    @torch.no_grad()
    def settle(self, means: Mapping[str, float], surplus: float, following: float) -> None:
        """Once a step, from means over the tokens of the global batch: `surplus` decisions a token went on beyond
        the budget; in the following step a share `following` of each decision may go on."""
        seen, ran = means["budget/seen"], means["budget/ran"]
        _, mean, variance, correction, sigma2, _, steps = self.state.tolist()
        if seen > 0:
            rate = max(RATE, 1 / (steps + 1))
            now = means["budget/score"] / seen
            mean += rate * (now - mean)
            variance += rate * (max(0.0, means["budget/score_sq"] / seen - now**2) - variance)
            correction = min(max(correction + GAIN * surplus, -FARTHEST), FARTHEST)
        if ran > 0:
            sigma2 += max(SLOW, 1 / (steps + 1)) * (means["budget/benefit_sq"] / ran - sigma2)
        z = NormalDist().inv_cdf(min(max(1 - following, 1e-6), 1 - 1e-6))
        theta = mean + max(variance, 0.0) ** 0.5 * (z + correction)
        new = [theta, mean, variance, correction, max(sigma2, 1e-12), following, steps + 1]
        self.state.copy_(torch.tensor(new))


class Gates(Threshold):
    """The threshold, and learned scores of the open decisions of a window.

    Parameters: `mlps`, one H -> width H -> 1 for each decision.
    """

    def __init__(self, hidden: int, width: int, count: int, share: float):
        super().__init__(share)
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, width * hidden), nn.ReLU(), nn.Linear(width * hidden, 1))
            for _ in range(count)
        )
        for mlp in self.mlps:
            nn.init.normal_(mlp[0].weight)  # type: ignore[index]
            nn.init.normal_(mlp[2].weight, std=0.3)  # type: ignore[index]
            nn.init.zeros_(mlp[2].bias)  # type: ignore[index]

    def score(self, index: int, active: Tensor, state: Tensor, tools: ExitTools) -> Tensor:
        """Scores of decision `index` [s, b] of active tokens, from states [s, b, H], 0 elsewhere."""
        first: nn.Linear
        last: nn.Linear
        first, _, last = self.mlps[index]  # type: ignore[misc]
        into, out = scales(state.shape[-1], last.in_features)

        def compute(h: Tensor) -> Tensor:
            return linear32(last, torch.relu(linear32(first, h) * into)) * out

        return tools.broadcast(tools.on(active, compute, state.detach())[..., 0])


class Decisions:
    """Decisions about the tokens of one micro-batch, over passes; what it keeps lies in the method's `carry`."""

    def __init__(self, names: Sequence[str], explore: float, carry: dict[str, Tensor], tools: ExitTools):
        self.names, self.explore, self.carry, self.tools = names, explore, carry, tools
        self.gates: Gates = tools.modules["budget"]  # type: ignore[assignment]
        """A bare `Threshold` where the method does not learn its scores."""

    def decide(self, index: int, active: Tensor, score: Tensor, at_random: Sequence[float] | None) -> Tensor:
        """Which active tokens go on at decision `index`, bool [s, b], by their scores [s, b].

        `at_random`, in evaluation: shares that go on instead of those whose score is high.
        """
        carry, tools = self.carry, self.tools
        if at_random is not None:
            return active & (lottery(tools, 2 * index) < at_random[index])
        high = score.detach() >= self.gates.theta
        asked = active & (carry.get("wanted", active.float()) > 0.5)  # those that the scores would have sent here
        seen = active * score.detach()
        self._count(seen=active, score=seen, score_sq=seen.square())
        self._count(**{f"asked{index}": asked, f"went{index}": asked & high})
        carry["wanted"], carry[f"score{index}"] = (asked & high).float(), score
        if tools.step is None or not self.explore:
            return active & high
        drawn = lottery(tools, 2 * index) < self.gates.state[SHARE]
        return active & torch.where(lottery(tools, 2 * index + 1) < self.explore, drawn, high)

    def learn(self, index: int, losses: Tensor, ran: Tensor) -> None:
        """`losses` [s, b] of tokens had they stopped before decision `index`, or after the last one; of those that
        `ran` up to there."""
        carry = self.carry
        if index:
            benefit = (carry["loss"] - losses).clamp(-LARGEST, LARGEST)
            counted = ran * self.tools.valid_sb
            benefit = torch.where(counted > 0, benefit, torch.zeros_like(benefit))
            self._count(ran=ran, benefit_sq=benefit.square())
            wrong = carry[f"score{index - 1}"] - benefit / self.gates.sigma
            cost = (wrong.square() * counted).sum()
            carry["cost"] = carry["cost"] + cost if "cost" in carry else cost
        carry["loss"] = losses

    def _count(self, **values: Tensor) -> None:
        for name, value in values.items():
            key = f"budget/{name}"
            found = (value.detach().float() * self.tools.valid_sb).sum()
            self.carry[key] = self.carry[key] + found if key in self.carry else found

    def stats(self) -> dict[str, Tensor]:
        """For `Readout.stats`."""
        valid = self.tools.valid_sb.sum()
        zero = torch.zeros_like(valid)
        price = self.gates.theta * self.gates.sigma * valid
        return {name: price if name == PRICE else self.carry.get(name, zero) for name in self.names}


class Budgeted:
    """What methods with a `target` share: a mixin before `Method`, whose Options have target, explore, ramp_start,
    ramp_end and, if scores are learned, gate_width."""

    learns = True
    """Scores are learned from what a pass brings; otherwise `decide` is given others."""

    options: Any
    shape: Shape
    window: Window | None
    at_random: Sequence[float] | None
    stats: tuple[str, ...]

    def open_window(self, deepest: int, unit: str) -> None:
        """Called by `__init__`: `deepest` passes (or rows) are what a target of 1 means; ConfigError for a bad one."""
        target: float = self.options.target
        if target == 0:
            return
        least = math.ceil(1000 / deepest) / 1000
        if not least <= target <= 1:
            raise ConfigError(
                "ponder.options.target",
                target,
                f"it must be 0 (no budget), or at least {least} (one of {deepest} {unit}) and at most 1",
                f"use {0 if target < 0 else min(max(target, least), 1)}",
            )
        self.window = window(target, deepest)
        self.stats = (*self.stats, *stat_names(self.window, self.learns))

    def gates(self) -> Threshold:
        """For `exit_modules`, as "budget"."""
        assert self.window is not None
        share = self.share_of_decisions(0)
        if not self.learns:
            return Threshold(share)
        return Gates(self.shape.hidden_size, self.options.gate_width, self.window.gates, share)

    def decisions(self, carry: dict[str, Tensor], tools: ExitTools) -> Decisions:
        assert self.window is not None
        return Decisions(stat_names(self.window, self.learns), self.options.explore, carry, tools)

    def share_of_decisions(self, step: int) -> float:
        """Of each decision, the share that the budget lets go on; 1 before a ramp starts.

        With two decisions a share p gives p + p^2 passes beyond the least.
        """
        assert self.window is not None
        extra = self.window.mean - self.window.least
        p = extra if self.window.gates == 1 else ((1 + 4 * extra) ** 0.5 - 1) / 2
        now = torch.tensor(float(step), dtype=torch.float64, device="cpu")
        return 1 + float(ramp(now, self.options.ramp_start, self.options.ramp_end)) * (p - 1)

    def settle(self, exit_modules: nn.ModuleDict | None, means: Mapping[str, float], step: int) -> dict[str, float]:
        if self.window is None:
            return {}
        depth, reached = float(self.window.least), 1.0
        for i in range(self.window.gates):  # of tokens that the scores sent to a decision, some were not drawn
            asked = means[f"budget/asked{i}"]
            reached *= means[f"budget/went{i}"] / asked if asked else 0.0
            depth += reached
        goal = self.budget(step)
        assert goal is not None
        if exit_modules is not None:
            gates: Any = exit_modules["budget"]
            gates.settle(means, depth - goal, self.share_of_decisions(step + 1))
        return {"wanted_depth": depth}

    def budget(self, step: int) -> float | None:
        if self.window is None:
            return None
        p = self.share_of_decisions(step)
        return self.window.least + sum(p**k for k in range(1, self.window.gates + 1))


def mixed(x: Tensor) -> Tensor:
    """Numbers in [0, 1) that look random, from whole numbers: a mixing of 32-bit integers, the same everywhere."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = ((x ^ ((x & 0xFFFFFFFF) >> shift)) * factor) & 0xFFFFFFFF
    return (x & 0xFFFFFF).double() / 2**24


def lottery(tools: ExitTools, index: int) -> Tensor:
    """A number in [0, 1) of each token [s, b] for decision `index`, drawn from step, position and token."""
    step = torch.zeros((), dtype=torch.long) if tools.step is None else tools.step.long() + 1
    drawn = (tools.positions_sb.long() + 1) * 0x9E3779B1 + (tools.ids_sb.long() + 1) * 0x85EBCA6B
    return mixed((drawn ^ (step.to(drawn.device) * 0xC2B2AE35)) + (index + 1) * 0x27D4EB2F)
