"""Decoding of adaptive latent CoT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.backbone import linear, wide
from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Run, View, readable


@dataclass
class Merged(View):
    """Rows read the keys of all passes up to their own."""

    def join(self, entry: int, k: Tensor, v: Tensor, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.cache is None:
            keys, values = [*before[0::2], k], [*before[1::2], v]
        else:
            self.cache.update(k, v, entry)
            step = self.cache.layers_a_pass
            layers = self.cache.layers[entry % step : entry + 1 : step]
            keys, values = [x.keys for x in layers], [x.values for x in layers]
        return torch.cat(keys, dim=2), torch.cat(values, dim=2), k, v

    def kept(self, before: tuple[Tensor, ...], k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return () if self.cache is not None else (*before, k, v)


def merged(run: Run, index: int, alive: Tensor | None) -> Merged:
    """A pass whose rows read all living rows of passes 0 .. index of their token and those before."""
    token = run.add(index, 1, alive)
    seen = [run.rows[i] for i in range(index + 1)]
    keys = torch.cat([rows.token for rows in seen])
    return Merged(run.positions, readable(token, keys, run.there(seen)), None, run.cache)


class AdaptiveCot(DecodingMethod):
    """Step k + 1 of a token starts from the state h_k of its step k, as long as reach_k g_k >= threshold, k < steps.

    g_k is a router's gate on h_k; reach_0 = 1, reach_{k+1} = reach_k g_k.  Step k reads steps 0 .. k of its token and
    of those before, as far as they were run.  The output is sum_k e_k h_k, with e_k = reach_k (1 - g_k), or reach_k at
    the last step.
    """

    name = "adaptive_cot"
    defaults = {"steps": 3, "threshold": 0.01}
    training_only = ("cost_weight", "cost_power", "router_bias")

    def modules(self) -> dict[str, nn.Module]:
        return {"router": nn.Linear(self.config.hidden_size, 1)}

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net, steps = model.model, self.options["steps"]
        x = net.embed(net.embed_tokens(ids), run.positions)
        kept: list[tuple[Tensor, ...]] = [()] * len(net.layers)
        out, reach, alive = torch.zeros_like(x), wide(torch.ones_like(x[..., 0])), run.real
        for step in range(steps + 1):
            x = net.norm(net.stack(x, step, merged(run, step, alive if step else None), kept))
            on = reach * linear(model.method["router"], x)[..., 0].sigmoid()
            go_on = alive & (on >= self.options["threshold"]) & (step < steps)
            mass = torch.where(go_on, reach - on, reach) * alive
            out = out + mass.to(x.dtype)[..., None] * x
            reach, alive = on, go_on
            if not alive.any():
                break
        if run.cache is not None:
            for index in run.rows:
                run.cache.drop_dead(index)
        return out
