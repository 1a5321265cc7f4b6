"""Float64 models of the adaptive methods, written from the formulas (one sequence, plain loops over passes)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaponder.decoding.window import window
from tests.oracles.reference import Oracle, Result, causal


def _linear(o: Oracle, name: str, x: Tensor) -> Tensor:
    return o.linear(x, f"method_modules.{name}")


def _router(o: Oracle, name: str, x: Tensor) -> Tensor:
    """The logit of a router of one or two layers."""
    if f"method_modules.{name}.2.weight" in o.w:
        return _linear(o, f"{name}.2", torch.relu(_linear(o, f"{name}.0", x)))[:, 0]
    return _linear(o, name, x)[:, 0]


def _mixture(o: Oracle, h: Tensor, topk: int) -> Tensor:
    z = h @ o.head.T
    if topk:
        z = z.masked_fill(z < z.topk(topk).values[:, -1:], -math.inf)
    return z.softmax(-1) @ (o.scale * o.table)


def _lottery(ids: Tensor, draw: int) -> Tensor:
    """A number of each token at step 0, from its position and id."""
    out = []
    for t, token in enumerate(ids.tolist()):
        x = (((t + 1) * 0x9E3779B1 + (token + 1) * 0x85EBCA6B) ^ 0xC2B2AE35) + (draw + 1) * 0x27D4EB2F
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            x = ((x ^ ((x % 2**32) >> shift)) * factor) % 2**32
        out.append((x % 2**24) / 2**24)
    return torch.tensor(out, dtype=torch.float64)


class _Budget:
    """Scores, decisions and the scores' error of a method with a target; in training (labels given) at step 0."""

    def __init__(self, o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None, rows: int):
        self.o, self.ids, self.labels = o, ids, labels
        self.explore = options.get("explore", 0.1)
        self.weight = options.get("cost_weight" if "gates" in options else "score_weight", 0.1)
        self.window = window(options["target"], rows)
        state = o.w["method_modules.budget.state"].detach()
        self.theta, self.sigma, self.share = state[0], state[4].sqrt(), state[5]
        self.scores: list[Tensor] = []
        self.losses: list[tuple[Tensor, Tensor]] = []

    def go_on(self, index: int, h: Tensor, active: Tensor) -> Tensor:
        h = h.detach()
        inner = torch.relu(_linear(self.o, f"budget.mlps.{index}.0", h) / h.shape[1] ** 0.5)
        score = 8 / inner.shape[1] * _linear(self.o, f"budget.mlps.{index}.2", inner)[:, 0]
        self.scores.append(score)
        return self.choose(index, score.detach(), active)

    def choose(self, index: int, score: Tensor, active: Tensor) -> Tensor:
        go = score >= self.theta
        if self.labels is not None:
            drawn = _lottery(self.ids, 2 * index) < self.share
            go = torch.where(_lottery(self.ids, 2 * index + 1) < self.explore, drawn, go)
        return active & go

    def stop(self, state: Tensor, ran: Tensor) -> None:
        """What the loss would be if tokens stopped here."""
        if self.labels is not None:
            logits = (state @ self.o.head.T).detach()
            loss = torch.logsumexp(logits, -1) - logits.gather(1, self.labels[:, None])[:, 0]
            self.losses.append((loss, ran))

    def cost(self, mask: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i, score in enumerate(self.scores):
            (before, _), (after, ran) = self.losses[i : i + 2]
            wrong = score - (before - after).clamp(-3, 3) / self.sigma
            total = total + (wrong.square() * ran * mask).sum()
        return self.weight * total


def _rows(stages: list[Tensor]) -> Tensor:
    return torch.stack(stages, dim=1).flatten(0, 1)


def ponderlm2(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """K growing passes, J refinements, one final pass; logits from slot K."""
    n, k, j = len(ids), options.get("latents", 1), options.get("jacobi", 3)
    stages = [o.embed(ids, torch.arange(n))]

    def run() -> Tensor:
        positions = torch.arange(n).repeat_interleave(len(stages))
        return o.norm(o.stack(_rows(stages), positions), "final_norm").view(n, len(stages), -1)

    def feed(h: Tensor) -> Tensor:
        return _mixture(o, h, options.get("topk", 0)) if options.get("softmax_feedback") else h

    for i in range(k + j):
        h = run()
        stages = [stages[0]] + [feed(h[:, s]) for s in range(min(i + 1, k))]
    return Result(run()[:, k] @ o.head.T)


def ponderlm3(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """As PonderLM-2, with the log tail masses of the pass before on the keys, and the exit-mass mixture."""
    n, k, j = len(ids), options.get("latents", 3), options.get("jacobi", 3)
    stages, router = [o.embed(ids, torch.arange(n))], None
    budget = None
    if options.get("target"):
        k = window(options["target"], k + 1).most - 1

    def route(h: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal budget
        a, alive = _linear(o, "router", h), torch.ones(n, k + 1, dtype=torch.bool)
        if options.get("target"):
            budget = _Budget(o, ids, options, labels, options.get("latents", 3) + 1)
            for row in range(budget.window.least, k + 1):
                alive[:, row] = budget.go_on(row - budget.window.least, h, alive[:, row - 1])
        return torch.where(alive, a, -1e9), alive

    def tails(a: Tensor) -> Tensor:
        s = a.softmax(-1)
        return torch.stack([s[:, i:].sum(-1) for i in range(k + 1)], dim=1)

    for i in range(k + j + 1):
        m = len(stages)
        bias = (
            torch.zeros(n, m, dtype=torch.float64) if router is None else tails(router)[:, :m].clamp(min=1e-300).log()
        )
        if m > 1:
            bias = torch.cat([torch.zeros(n, 1, dtype=torch.float64), bias[:, 1:]], dim=1)
        x = o.stack(_rows(stages), torch.arange(n).repeat_interleave(m), causal(n * m) + bias.reshape(1, -1))
        h = o.norm(x, "final_norm").view(n, m, -1)
        router, alive = route(h[:, 0])
        if i < k + j:
            stages = [stages[0]] + [h[:, s] for s in range(min(i + 1, k))]
    assert router is not None
    w = tails(router)
    out = (router.softmax(-1)[..., None] * h).sum(1)
    depth = 1 + (w[:, 1:] >= options.get("threshold", 1e-4)).sum(-1)
    if budget is not None:
        for last in range(budget.window.least - 1, k + 1):
            shares = router[:, : last + 1].softmax(-1)
            budget.stop((shares[..., None] * h[:, : last + 1]).sum(1), alive[:, last])
        return Result(out @ o.head.T, alive.sum(-1), budget.cost)

    def cost(mask: Tensor) -> Tensor:
        excess = (w[:, 1:].sum(-1) - options.get("target_depth", 0.0)) * mask
        total = excess.sum()
        return options.get("cost_weight", 0.01) * (total.clamp(min=0) if options.get("target_depth") else total)

    return Result(out @ o.head.T, depth, cost)


def _pruned(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """A fixed number of passes for each position: floor(depth), or one more."""
    from megaponder.ponder.methods.pruned_ponderlm.training import spread

    t, extra = torch.arange(len(ids)), options["depth"] % 1
    if options.get("by", "random") == "random":
        chosen = spread(t, options.get("seed", 0)) < extra
    else:
        chosen = torch.tensor([math.floor((i + 1) * extra) - math.floor(i * extra) == 1 for i in range(len(ids))])
    passes = int(options["depth"]) + chosen.long()
    return _halting(o, ids, options, lambda i, state, active: passes > i + 1)


def _confident(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """Exit where the largest next-token probability reaches the threshold; with a target, 1 minus it is the score."""

    def best(state: Tensor) -> Tensor:
        return (state @ o.head.T).detach().softmax(-1).amax(-1)

    if not options.get("target"):
        return _halting(o, ids, options, lambda i, state, active: best(state) < options["threshold"])
    budget = _Budget(o, ids, options, labels, options.get("steps", 3) + 1)
    least, most = budget.window.least, budget.window.most

    def rule(i: int, state: Tensor, active: Tensor) -> Tensor:
        return active if i + 1 < least else budget.choose(i + 1 - least, 1 - best(state), active)

    return _halting(o, ids, options | {"steps": most - 1}, rule)


def adaponderlm(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """PonderLM with a gate per pass; halted tokens keep state and keys."""
    if options.get("router") == "none":
        return _halting(o, ids, options, lambda i, state, active: active)
    if not options.get("target"):
        return _halting(o, ids, options, None)
    budget = _Budget(o, ids, {"gates": True, **options}, labels, options.get("steps", 3) + 1)
    least, most = budget.window.least, budget.window.most

    def rule(i: int, state: Tensor, active: Tensor) -> Tensor:
        if i + 1 >= least:
            budget.stop(state, active)
            if i + 1 < most:
                return budget.go_on(i + 1 - least, state, active)
        return active

    return _halting(o, ids, options | {"steps": most - 1}, rule, budget.cost)


def _halting(
    o: Oracle,
    ids: Tensor,
    options: dict[str, Any],
    rule: Callable[[int, Tensor, Tensor], Tensor] | None,
    cost_of_rule: Callable[[Tensor], Tensor] | None = None,
) -> Result:
    """Aligned halting by gates, or by a rule (pass, states, active) -> tokens that go on; it sees the last pass too."""
    n, steps = len(ids), options.get("steps", 3)
    positions = torch.arange(n)
    e, active, state = o.embed(ids, positions), torch.ones(n, dtype=torch.bool), None
    before: dict[str, tuple[Tensor, Tensor]] = {}
    gates, asked, depth = [], [], torch.zeros(n, dtype=torch.long)
    opening = o.w["method_modules.feedback_gate.weight"] if options.get("gentle_start") else 1.0
    for i in range(steps + 1):
        last, before = before, {}

        def keys(name: str, k: Tensor, v: Tensor, last: Any = last, now: Any = before, on: Tensor = active) -> Any:
            if last:
                on = on[:, None, None]
                k, v = torch.where(on, k, last[name][0]), torch.where(on, v, last[name][1])
            now[name] = (k, v)
            return k, v

        h = o.norm(o.stack(e, positions, keys=keys), "final_norm")
        depth = depth + active
        state = h if state is None else torch.where(active[:, None], h, state)
        if i == steps and cost_of_rule is not None and rule is not None:
            rule(i, state, active)
        elif i < steps and rule is not None:
            active = active & rule(i, state, active)
            e = e + active[:, None] * opening * _mixture(o, state, options.get("topk", 0))
        elif i < steps:
            gate = _router(o, f"gates.{0 if options.get('shared_gate') else i}", state)
            gates.append(gate)
            asked.append(active)
            active = active & (gate.sigmoid() >= options.get("threshold", 1e-4))
            e = e + (active * gate.sigmoid())[:, None] * opening * _mixture(o, state, options.get("topk", 0))
    assert state is not None

    def cost(mask: Tensor) -> Tensor:
        values = torch.stack(gates)
        values = values.clamp(min=-12) if options.get("cost_on", "logit") == "logit" else values.sigmoid()
        chosen = values[torch.stack(asked) & (mask > 0)].sort().values
        count = math.ceil(options.get("bottom_share", 0.1) * len(chosen))
        return options.get("cost_weight", 0.1) * mask.sum() * chosen[:count].mean() if count else mask.sum() * 0.0

    return Result(state @ o.head.T, depth, cost if rule is None else cost_of_rule)


def adaptive_cot(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """Steps k of all tokens in pass k; keys of all earlier steps that exist; exit-mass mixture."""
    n, steps, tau = len(ids), options.get("steps", 3), options.get("threshold", 0.01)
    positions, x = torch.arange(n), o.embed(ids, torch.arange(n))
    reach, alive = torch.ones(n, dtype=torch.float64), torch.ones(n, dtype=torch.bool)
    out, depth, penalties, alives = 0.0, torch.zeros(n, dtype=torch.long), [], []
    cache: dict[str, list[tuple[Tensor, Tensor]]] = {}
    budget = None
    if options.get("target"):
        budget = _Budget(o, ids, options, labels, steps + 1)
        steps = budget.window.most - 1

    def keys(name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cache.setdefault(name, []).append((k, v))
        return torch.cat([a for a, _ in cache[name]]), torch.cat([b for _, b in cache[name]])

    for i in range(steps + 1):
        alives.append(alive)
        gone = [torch.where(a, 0.0, -math.inf).double()[None] for a in alives]
        bias = torch.cat([causal(n) + g for g in gone], dim=1)
        bias = torch.where(alive[:, None], bias, torch.zeros((), dtype=torch.float64))  # dead rows: finite, never read
        h = o.norm(o.stack(x, positions, bias, keys), "final_norm")
        gate = torch.ones_like(reach) if options.get("router") == "none" else _router(o, "router", h).sigmoid()
        go_on = alive & (reach * gate >= tau) if i < steps else torch.zeros_like(alive)
        if budget is not None:
            opened = i + 1 - budget.window.least
            if opened >= 0:
                budget.stop(out + reach[:, None] * h, alive)
            go_on = alive & (i < steps)
            if 0 <= opened < budget.window.gates:
                go_on = budget.go_on(opened, h, alive)
        elif i < steps and labels is not None:
            right = (h @ o.head.T).softmax(-1).gather(1, labels[:, None])[:, 0].detach()
            penalties.append(right ** options.get("cost_power", 1.0) * reach * gate)
        out = out + (alive * torch.where(go_on, reach * (1 - gate), reach))[:, None] * h
        depth, reach = depth + alive, torch.where(go_on, reach * gate, torch.zeros_like(reach))
        x, alive = h, go_on

    def cost(mask: Tensor) -> Tensor:
        return options.get("cost_weight", 0.01) * (torch.stack(penalties).sum(0) * mask).sum()

    return Result(out @ o.head.T, depth, cost if budget is None else budget.cost)


METHODS = {
    "ponderlm2": ponderlm2,
    "ponderlm3": ponderlm3,
    "adaponderlm": adaponderlm,
    "adaptive_cot": adaptive_cot,
    "pruned_ponderlm": _pruned,
    "confident_ponderlm": _confident,
}
