"""Float64 models of the adaptive methods, written from the formulas (one sequence, plain loops over passes)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.oracles.reference import Oracle, Result, causal


def _linear(o: Oracle, name: str, x: Tensor) -> Tensor:
    return o.linear(x, f"method_modules.{name}")


def _mixture(o: Oracle, h: Tensor, topk: int) -> Tensor:
    z = h @ o.head.T
    if topk:
        z = z.masked_fill(z < z.topk(topk).values[:, -1:], -math.inf)
    return z.softmax(-1) @ (o.scale * o.table)


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

    def tails(a: Tensor) -> Tensor:
        s = a.softmax(-1)
        return torch.stack([s[:, i:].sum(-1) for i in range(k + 1)], dim=1)

    for i in range(k + j + 1):
        m = len(stages)
        bias = torch.zeros(n, m, dtype=torch.float64) if router is None else tails(router)[:, :m].log()
        if m > 1:
            bias = torch.cat([torch.zeros(n, 1, dtype=torch.float64), bias[:, 1:]], dim=1)
        x = o.stack(_rows(stages), torch.arange(n).repeat_interleave(m), causal(n * m) + bias.reshape(1, -1))
        h = o.norm(x, "final_norm").view(n, m, -1)
        router = _linear(o, "router", h[:, 0])
        if i < k + j:
            stages = [stages[0]] + [h[:, s] for s in range(min(i + 1, k))]
    assert router is not None
    w = tails(router)
    out = (router.softmax(-1)[..., None] * h).sum(1)
    depth = 1 + (w[:, 1:] >= options.get("threshold", 1e-4)).sum(-1)

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
    return _halting(o, ids, options, lambda i, state: passes > i + 1)


def _confident(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """Exit where the largest next-token probability reaches the threshold."""
    return _halting(o, ids, options, lambda i, state: (state @ o.head.T).softmax(-1).amax(-1) < options["threshold"])


def adaponderlm(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """PonderLM with a gate per pass; halted tokens keep state and keys."""
    return _halting(o, ids, options, None)


def _halting(o: Oracle, ids: Tensor, options: dict[str, Any], rule: Callable[[int, Tensor], Tensor] | None) -> Result:
    """Aligned halting by gates, or by a rule (pass, states) -> tokens that go on."""
    n, steps = len(ids), options.get("steps", 3)
    positions = torch.arange(n)
    e, active, state = o.embed(ids, positions), torch.ones(n, dtype=torch.bool), None
    before: dict[str, tuple[Tensor, Tensor]] = {}
    gates, asked, depth = [], [], torch.zeros(n, dtype=torch.long)
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
        if i < steps and rule is not None:
            active = active & rule(i, state)
            e = e + active[:, None] * _mixture(o, state, options.get("topk", 0))
        elif i < steps:
            inner = torch.relu(_linear(o, f"gates.{i}.0", state))
            gate = _linear(o, f"gates.{i}.2", inner)[:, 0]
            gates.append(gate)
            asked.append(active)
            active = active & (gate.sigmoid() >= options.get("threshold", 1e-4))
            e = e + (active * gate.sigmoid())[:, None] * _mixture(o, state, options.get("topk", 0))
    assert state is not None

    def cost(mask: Tensor) -> Tensor:
        values = torch.stack(gates)
        values = values.clamp(min=-12) if options.get("cost_on", "logit") == "logit" else values.sigmoid()
        chosen = values[torch.stack(asked) & (mask > 0)].sort().values
        count = math.ceil(options.get("bottom_share", 0.1) * len(chosen))
        return options.get("cost_weight", 0.1) * mask.sum() * chosen[:count].mean() if count else mask.sum() * 0.0

    return Result(state @ o.head.T, depth, cost if rule is None else None)


def adaptive_cot(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """Steps k of all tokens in pass k; keys of all earlier steps that exist; exit-mass mixture."""
    n, steps, tau = len(ids), options.get("steps", 3), options.get("threshold", 0.01)
    positions, x = torch.arange(n), o.embed(ids, torch.arange(n))
    reach, alive = torch.ones(n, dtype=torch.float64), torch.ones(n, dtype=torch.bool)
    out, depth, penalties, alives = 0.0, torch.zeros(n, dtype=torch.long), [], []
    cache: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keys(name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cache.setdefault(name, []).append((k, v))
        return torch.cat([a for a, _ in cache[name]]), torch.cat([b for _, b in cache[name]])

    for i in range(steps + 1):
        alives.append(alive)
        gone = [torch.where(a, 0.0, -math.inf).double()[None] for a in alives]
        bias = torch.cat([causal(n) + g for g in gone], dim=1)
        bias = torch.where(alive[:, None], bias, torch.zeros((), dtype=torch.float64))  # dead rows: finite, never read
        h = o.norm(o.stack(x, positions, bias, keys), "final_norm")
        gate = _linear(o, "router", h)[:, 0].sigmoid()
        go_on = alive & (reach * gate >= tau) if i < steps else torch.zeros_like(alive)
        if i < steps and labels is not None:
            right = (h @ o.head.T).softmax(-1).gather(1, labels[:, None])[:, 0].detach()
            penalties.append(right ** options.get("cost_power", 1.0) * reach * gate)
        out = out + (alive * torch.where(go_on, reach * (1 - gate), reach))[:, None] * h
        depth, reach = depth + alive, torch.where(go_on, reach * gate, torch.zeros_like(reach))
        x, alive = h, go_on

    def cost(mask: Tensor) -> Tensor:
        return options.get("cost_weight", 0.01) * (torch.stack(penalties).sum(0) * mask).sum()

    return Result(out @ o.head.T, depth, cost)


METHODS = {
    "ponderlm2": ponderlm2,
    "ponderlm3": ponderlm3,
    "adaponderlm": adaponderlm,
    "adaptive_cot": adaptive_cot,
    "pruned_ponderlm": _pruned,
    "confident_ponderlm": _confident,
}
