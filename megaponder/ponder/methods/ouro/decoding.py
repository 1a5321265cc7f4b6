"""Decoding of Ouro."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaponder.decoding.backbone import linear
from megaponder.decoding.kv_budget import entry_of
from megaponder.decoding.passes import Run
from megaponder.decoding.steps import State, Stepwise, flag


class Ouro(Stepwise):
    """The stack runs `loops` times, each with keys and values of its own. With `threshold` below 1 a token is read out
    after the first loop at which the sum of its exit distribution reaches the threshold. Its later loops still run,
    since later tokens need their keys and values; with `skips_loops` they do not, and later tokens see the keys and
    values of its last loop instead. With `kv_budget` a token keeps the keys and values of its newest loops only: of the
    last one with 1."""

    name = "ouro"
    defaults = {"loops": 4, "threshold": 1.0, "skips_loops": False, "kv_budget": 0}
    training_only = ("stage", "entropy_weight", "judges", "gain_scale", "gain_from")
    as_trained = {"skips_loops": False, "kv_budget": 0}

    @property
    def halts(self) -> bool:  # type: ignore[override]
        return bool(self.options["skips_loops"] and self.options["threshold"] < 1)

    @property
    def fixed(self) -> bool:
        return bool(self.options["threshold"] >= 1)

    @property
    def why_not_batched(self) -> str:  # type: ignore[override]
        return (
            f"with threshold {self.options['threshold']:g} a token that has exited still runs its later loops, unless "
            "ponder.options.skips_loops (in an export's config.json, method_options.skips_loops) is true"
        )

    def modules(self) -> dict[str, nn.Module]:
        return {"gate": nn.Linear(self.config.hidden_size, 1)}

    def trained(self) -> int:
        return int(self.options["loops"])

    def begin(self, model: Any, ids: Tensor, positions: Tensor) -> State:
        return {**super().begin(model, ids, positions), "survival": torch.zeros(positions.shape, device=ids.device)}

    def leave(self, model: Any, index: int | Tensor, h: Tensor, state: State, positions: Tensor) -> bool | Tensor:
        state["out"] = model.model.norm(h)
        # the sum reaches 1.0 by rounding: a threshold of 1 means never
        state["survival"] = state["survival"] + F.logsigmoid(-linear(model.method["gate"], state["out"])[..., 0])
        goes_on = -torch.expm1(state["survival"]) < self.options["threshold"]
        if self.options["threshold"] >= 1:
            goes_on = torch.ones_like(goes_on)
        return goes_on & flag(index + 1 < self.deepest(), h)

    def enter(self, model: Any, index: int | Tensor, state: State) -> None:
        state["x"] = state["out"]

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        if self.halts:
            return self._gathered(model, ids, run)
        state = self.begin(model, ids, run.positions)
        going = torch.ones_like(run.positions, dtype=torch.bool)
        run.depth, out = torch.zeros_like(run.positions), state["x"]
        for index in range(self.deepest()):
            at = entry_of(index, self.kv_budget)
            h = model.model.stack(state["x"], at, run.entry(at), steps=(index,))
            go_on = self.leave(model, index, h, state, run.positions)
            out, run.depth = torch.where(going[..., None], state["out"], out), run.depth + going
            going = going & go_on
            self.enter(model, index, state)
        return out
