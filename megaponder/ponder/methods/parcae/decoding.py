"""Decoding of Parcae."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megaponder.decoding.passes import Run

from ..huginn.decoding import DECODING, Recurrent
from .injection import GATED, Injection, Values, has_values


class Parcae(Recurrent):
    """As in huginn: the prelude runs once, the core `recurrence` times, the coda once."""

    name = "parcae"
    training_only = ("draw_to", "kept")
    defaults = {"prelude": 2, "coda": 2, "recurrence": 8, "noise_seed": 0, "value_embeddings": False, **DECODING}

    def entry_modules(self) -> dict[str, nn.Module]:
        return {"injection": Injection(self.config.hidden_size)}

    def modules(self) -> dict[str, nn.Module]:
        return {"C": nn.Linear(self.config.hidden_size, self.config.hidden_size, bias=False)}

    def layer_modules(self, layer: int) -> dict[str, nn.Module]:
        c = self.config
        if not (self.options["value_embeddings"] and has_values(layer, c.num_hidden_layers)):
            return {}
        return {"value": Values(c.vocab_size, c.num_key_value_heads, c.head_size)}

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        if self.options["value_embeddings"]:
            heads, layers = slice(0, self.config.num_key_value_heads), self.config.num_hidden_layers

            def add(entry: int, x: Tensor, v: Tensor) -> Tensor:
                own = model.method_layers[str(entry % layers)]
                return v + own["value"](ids, x[..., :GATED], heads).flatten(-2) if "value" in own else v

            run.values = add
        return super().hidden(model, ids, run)

    def embedded(self, model: Any, e: Tensor) -> Tensor:
        out: Tensor = model.method_entry["injection"].prepared(e)
        return out

    def mixed(self, model: Any, state: Tensor, embedded: Tensor) -> Tensor:
        out: Tensor = model.method_entry["injection"](state, embedded)
        return out

    def between(self, model: Any, state: Tensor) -> Tensor:
        out: Tensor = model.method["C"](state)
        return out
