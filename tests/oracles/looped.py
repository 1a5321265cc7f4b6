"""Float64 models of the looped methods; see `reference`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaponder.decoding.noise import sequence_uniform, token_noise
from megaponder.ponder.drawn import poisson
from tests.oracles.reference import Oracle, Result


def recurrent(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None, retrofit: bool) -> Result:
    """Training (with labels) is step 0 with a fixed number of recurrences, of which the first have no gradient."""
    n, h, positions = len(ids), o.table.shape[1], torch.arange(len(ids))
    layers, r = o.m.num_layers, options["recurrence"]
    begin, end = options["prelude"], layers - options["coda"]
    e = o.stack(o.embed(ids, positions), positions, layers=range(begin))
    std = math.sqrt(2 / (5 * h)) * (1.0 if retrofit else math.sqrt(h))
    state = std * token_noise(ids, positions, 0, -1 if labels is None else 0, h).double()
    assert state.shape == (n, h)
    for i in range(r):
        joined = torch.cat([state, e], dim=-1) @ o.w["method_entry.adapter.weight"].T
        state = o.stack(joined, positions, layers=range(begin, end))
        if labels is not None and i < r - options["kept"]:
            state = state.detach()
    x = state if retrofit else o.norm(state, "final_norm")
    x = o.stack(x, positions, layers=range(end, layers))
    return Result(o.norm(x, "final_norm") @ o.head.T)


def parcae(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """As in `recurrent`, with a decaying state; in training a sequence draws its depth, and starts with it."""
    h, positions, layers = o.table.shape[1], torch.arange(len(ids)), o.m.num_layers
    begin, end, r = options["prelude"], layers - options["coda"], options["recurrence"]
    at = "method_entry.injection."
    if options.get("value_embeddings"):

        def more(name: str, y: Tensor) -> Tensor | float:
            own = f"method_layers.{name.split('.')[2]}.value."
            if f"{own}table" not in o.w:
                return 0.0
            gate = 2 * (y[:, :32] @ o.w[f"{own}gate"].T).sigmoid()
            return gate[..., None] * o.w[f"{own}table"][ids].unflatten(-1, (gate.shape[1], -1))

        o.more_values = more
    e = o.stack(o.embed(ids, positions), positions, layers=range(begin))
    e = e * (e.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * o.w[f"{at}norm"]
    dt = F.softplus(o.w[f"{at}dt_bias"])
    keep = (-dt * o.w[f"{at}A_log"].exp()).exp()
    state = math.sqrt(2 / (5 * h)) * token_noise(ids, positions, 0, -1 if labels is None else 0, h).double()
    if labels is not None and options["draw_to"]:
        u = float(sequence_uniform(ids[None], 0, 0))
        r = min(max(1, poisson(r, u)), options["draw_to"])
    for i in range(r):
        mixed = keep * state + dt * (e @ o.w[f"{at}B.weight"].T)
        state = o.stack(mixed, positions, layers=range(begin, end))
        if labels is not None and i < r - options["kept"]:
            state = state.detach()
    x = o.stack(state @ o.w["method_modules.C.weight"].T, positions, layers=range(end, layers))
    return Result(o.norm(x, "final_norm") @ o.head.T)


def ouro(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """Logits of the loop at which the exit distribution reaches the threshold; in training of the last one."""
    positions, loops = torch.arange(len(ids)), options["loops"]
    h, states, gates = o.embed(ids, positions), [], []
    for _ in range(loops):
        h = o.norm(o.stack(h, positions), "final_norm")
        states.append(h)
    second = options.get("stage", 1) == 2
    seen = [s.detach() for s in states] if second else states
    gates = [(s @ o.w["method_modules.gate.weight"].T + o.w["method_modules.gate.bias"])[:, 0] for s in seen]
    going = torch.ones(len(ids), dtype=torch.float64)
    chances = []
    for gate in gates[:-1]:
        chances.append(going * gate.sigmoid())
        going = going * (1 - gate.sigmoid())
    p = torch.stack([*chances, going])  # [loops, n]
    logits = torch.stack([s @ o.head.T for s in states])
    if labels is None:
        q = options.get("threshold", 1.0)
        at = (p.cumsum(0) >= q).long().argmax(0) if q < 1 else torch.full((len(ids),), loops - 1)
        return Result(logits[at, torch.arange(len(ids))])
    losses = torch.stack([F.cross_entropy(z, labels, reduction="none") for z in logits])

    def objective(mask: Tensor) -> Tensor:
        if not second:
            entropy = -(p * p.log()).sum(0)
            return (((p * losses).sum(0) - options["entropy_weight"] * entropy) * mask).sum()
        gains = (losses[:-1] - losses[1:]).clamp(min=0).detach()
        target = (50 * (gains - 0.005)).sigmoid()
        judges = torch.stack(gates[:-1] if options["judges"] == "next" else gates[1:])
        return (F.binary_cross_entropy_with_logits(-judges, target, reduction="none").mean(0) * mask).sum()

    each = torch.stack([z.logsumexp(-1) ** 2 for z in logits])  # weighed as the cross entropies are, by given weights
    return Result(logits[-1], objective=objective, squares=0 * each[0] if second else (p.detach() * each).sum(0))


def nanbeige(o: Oracle, ids: Tensor, options: dict[str, Any], labels: Tensor | None) -> Result:
    """Loops of the stack, of which the middle layers may be repeated within a loop."""
    positions, layers, m = torch.arange(len(ids)), o.m.num_layers, options.get("middle", 0)
    begin, end = (layers - m) // 2, (layers + m) // 2
    order = [*range(begin), *list(range(begin, end)) * ((layers + m) // m), *range(end, layers)] if m else range(layers)
    first: dict[str, tuple[Tensor, Tensor]] = {}

    def shared(name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return first.setdefault(name, (k, v))

    x, logits = o.embed(ids, positions), []
    for _ in range(options["loops"]):
        first.clear()
        for i in order:
            x = o.stack(x, positions, keys=shared if options.get("share_kv") else None, layers=range(i, i + 1))
        h = o.norm(x, "final_norm")
        logits.append(h @ o.head.T)
        x = h if options.get("norm_between", True) else x
    if labels is None or not options.get("loss_weights"):
        return Result(logits[-1])
    weights = [*options["loss_weights"], 1 - sum(options["loss_weights"])]
    losses = [w * F.cross_entropy(z, labels, reduction="none") for w, z in zip(weights, logits, strict=True)]
    squares = [w * z.logsumexp(-1) ** 2 for w, z in zip(weights, logits, strict=True)]
    objective = lambda mask: (torch.stack(losses).sum(0) * mask).sum()  # noqa: E731
    return Result(logits[-1], objective=objective, squares=torch.stack(squares).sum(0))


METHODS = {
    "huginn": lambda *a: recurrent(*a, retrofit=False),
    "retrofit": lambda *a: recurrent(*a, retrofit=True),
    "parcae": parcae,
    "ouro": ouro,
    "nanbeige": nanbeige,
}
