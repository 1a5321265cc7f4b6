"""Decoding of Parcae, and its injection."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaponder.decoding.backbone import wide

from ..huginn.decoding import DECODING, Recurrent

EPSILON = 1e-5
KEPT = math.sqrt(1 / 5)
"""The share of a state that the injection keeps at first."""


class Injection(nn.Module):
    """a s + dt B N(e): each channel of the state decays, so that no recurrence can amplify it without bound."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(width))
        self.A_log = nn.Parameter(torch.zeros(width))
        self.dt_bias = nn.Parameter(torch.full((width,), math.log(math.expm1(-math.log(KEPT)))))
        self.B = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.B.weight)

    def prepared(self, embedded: Tensor) -> Tensor:
        """B N(e), the same in every recurrence."""
        x = wide(embedded)
        x = x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * wide(self.norm)
        out: Tensor = self.B(x.to(embedded.dtype))
        return out

    def forward(self, state: Tensor, prepared: Tensor) -> Tensor:
        dt = F.softplus(wide(self.dt_bias))
        keep = torch.exp(-dt * torch.exp(wide(self.A_log)))
        return (keep * wide(state) + dt * wide(prepared)).to(prepared.dtype)


class Parcae(Recurrent):
    """As in huginn: the prelude runs once, the core `recurrence` times, the coda once."""

    name = "parcae"
    training_only = ("draw_to", "kept")
    defaults = {"prelude": 2, "coda": 2, "recurrence": 8, "noise_seed": 0, **DECODING}

    def entry_modules(self) -> dict[str, nn.Module]:
        return {"injection": Injection(self.config.hidden_size)}

    def modules(self) -> dict[str, nn.Module]:
        return {"C": nn.Linear(self.config.hidden_size, self.config.hidden_size, bias=False)}

    def embedded(self, model: Any, e: Tensor) -> Tensor:
        out: Tensor = model.method_entry["injection"].prepared(e)
        return out

    def mixed(self, model: Any, state: Tensor, embedded: Tensor) -> Tensor:
        out: Tensor = model.method_entry["injection"](state, embedded)
        return out

    def between(self, model: Any, state: Tensor) -> Tensor:
        out: Tensor = model.method["C"](state)
        return out
