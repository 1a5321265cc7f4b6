"""Decoding of adaptive latent CoT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megaponder.decoding.backbone import wide
from megaponder.decoding.gates import Gates, logit, router
from megaponder.decoding.steps import State, Stepwise, by_pass, flag
from megaponder.decoding.window import Window, window


class AdaptiveCot(Stepwise):
    """Step k + 1 of a token starts from the state h_k of its step k, as long as reach_k g_k >= threshold, k < steps.

    g_k is a router's gate on h_k (1 without a router); reach_0 = 1, reach_{k+1} = reach_k g_k. Step k reads steps 0
    .. k of its token and earlier ones, as far as they were run. The output is sum_k e_k h_k, with e_k = reach_k (1
    - g_k), or reach_k at the last step. With a target, who goes on is decided by scores instead: every token runs
    the window's least steps, then goes on while its score is at least the threshold that training left.
    """

    name, halts, merge = "adaptive_cot", True, True
    why_not_plain = "its steps read the keys and values of earlier steps"
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

    def trained(self) -> int:
        return int(self.options["steps"]) + 1 if self.window is None else self.window.most

    def begin(self, model: Any, ids: Tensor, positions: Tensor) -> State:
        state = super().begin(model, ids, positions)
        return {**state, "out": torch.zeros_like(state["x"]), "reach": wide(torch.ones_like(state["x"][..., 0]))}

    def leave(self, model: Any, index: int | Tensor, h: Tensor, state: State, positions: Tensor) -> bool | Tensor:
        x, reach, limit = model.model.norm(h), state["reach"], self.window
        on = reach * logit(model.method["router"], x).sigmoid() if "router" in model.method else reach
        if limit is None:
            go_on = on >= self.options["threshold"]
        else:
            go_on = by_pass(index, limit.least, limit.most, model.method["budget"].go_on, x)
        go_on = go_on & flag(index + 1 < self.deepest(), x)
        mass = torch.where(go_on, reach - on, reach)
        state.update(x=x, reach=on, out=state["out"] + mass.to(x.dtype)[..., None] * x)
        return go_on
