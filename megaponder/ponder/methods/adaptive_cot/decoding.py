"""Decoding of adaptive latent CoT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.backbone import wide
from megaponder.decoding.gates import Gates, logit, router
from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.passes import Run, View, readable
from megaponder.decoding.window import Window, window


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
    """A pass whose rows read all living rows of passes 0 .. index, of their own and earlier tokens."""
    token = run.add(index, 1, alive)
    seen = [run.rows[i] for i in range(index + 1)]
    keys = torch.cat([rows.token for rows in seen])
    return Merged(run.positions, readable(token, keys, run.there(seen)), None, run.cache)


class AdaptiveCot(DecodingMethod):
    """Step k + 1 of a token starts from the state h_k of its step k, as long as reach_k g_k >= threshold, k < steps.

    g_k is a router's gate on h_k (1 without a router); reach_0 = 1, reach_{k+1} = reach_k g_k. Step k reads steps 0
    .. k of its token and earlier ones, as far as they were run. The output is sum_k e_k h_k, with e_k = reach_k (1
    - g_k), or reach_k at the last step. With a target, who goes on is decided by scores instead: every token runs
    the window's least steps, then goes on while its score is at least the threshold that training left.
    """

    name = "adaptive_cot"
    defaults = {"steps": 3, "target": 0.0, "gate_width": 4, "threshold": 0.01, "router": "linear"}
    training_only = ("explore", "score_weight", "ramp_start", "ramp_end", "cost_weight", "cost_power", "router_bias")

    @property
    def window(self) -> Window | None:
        """Steps that the budget leaves open."""
        return window(self.options["target"], self.options["steps"] + 1) if self.options["target"] else None

    def modules(self) -> dict[str, nn.Module]:
        width, found = self.config.hidden_size, self.window
        made: dict[str, nn.Module] = {}
        if self.options["router"] != "none":
            made["router"] = router(self.options["router"], width, self.options["gate_width"])
        return made if found is None else {**made, "budget": Gates(width, self.options["gate_width"], found.gates)}

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        net, limit = model.model, self.window
        steps = self.options["steps"] if limit is None else limit.most - 1
        x = net.embed(net.embed_tokens(ids), run.positions)
        kept: list[tuple[Tensor, ...]] = [()] * len(net.layers)
        out, reach, alive = torch.zeros_like(x), wide(torch.ones_like(x[..., 0])), run.real
        for step in range(steps + 1):
            x = net.norm(net.stack(x, step, merged(run, step, alive if step else None), kept))
            on = reach * logit(model.method["router"], x).sigmoid() if "router" in model.method else reach
            go_on = alive & (step < steps)
            if limit is None:
                go_on = go_on & (on >= self.options["threshold"])
            elif limit.least <= step + 1 < limit.most:
                go_on = go_on & model.method["budget"].go_on(step + 1 - limit.least, x)
            mass = torch.where(go_on, reach - on, reach) * alive
            out = out + mass.to(x.dtype)[..., None] * x
            reach, alive = on, go_on
            if not alive.any():
                break
        if run.cache is not None:
            for index in run.rows:
                run.cache.drop_dead(index)
        return out
