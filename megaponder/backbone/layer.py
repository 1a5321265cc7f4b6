"""One transformer layer: two residual steps, or GPT-NeoX's parallel residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megaponder.backbone import fused
from megaponder.backbone.attention import Attend, Kept, Reads, read_rows

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "pythia": fused.gelu,
    "gpt2": fused.gelu_tanh,
    "llama": fused.swiglu,
}
"""By family; the gated one has no bias."""


def _add(x: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
    return x + out if bias is None else fused.add_biased(x, out, bias)


class PonderLayer(TransformerLayer):
    """megatron-core's layer (its parameters, its checkpoint names) with the attention hook passed through.

    Where Transformer Engine fuses the norms into the projections, `input_layernorm` and `pre_mlp_layernorm` are
    identities and the same forward holds.
    """

    def __init__(self, *args: Any, family: str, parallel_residual: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parallel_residual = parallel_residual
        self._activation = ACTIVATIONS[family]

    def forward(
        self, x_sbh: Tensor, rotary: Tensor | None, attend: Attend, kept: Kept, reads: Reads | None = None
    ) -> tuple[Tensor, Kept]:
        """Rows in, rows out; with `reads`, all rows serve as keys and only the rows that are read come out."""
        if not self.parallel_residual:
            attended, bias, kept = self.self_attention(self.input_layernorm(x_sbh), rotary, attend, kept, reads)
            x_sbh = _add(read_rows(x_sbh, reads), attended, bias)
            return _add(x_sbh, *self._mlp(x_sbh)), kept
        x_sbh, for_attention, for_mlp = fused.thrice(x_sbh)
        attended, bias, kept = self.self_attention(self.input_layernorm(for_attention), rotary, attend, kept, reads)
        x_sbh = read_rows(x_sbh, reads)
        inner, inner_bias = self._mlp(read_rows(for_mlp, reads))
        if bias is None or inner_bias is None:
            return x_sbh + attended + inner, kept
        return fused.add_biased_twice(x_sbh, attended, bias, inner, inner_bias), kept

    def _mlp(self, x_sbh: Tensor) -> tuple[Tensor, Tensor | None]:
        """megatron-core's MLP with the activation as one kernel; the bias of its end is left to the residual."""
        inner, bias = self.mlp.linear_fc1(self.pre_mlp_layernorm(x_sbh))
        out: tuple[Tensor, Tensor | None] = self.mlp.linear_fc2(
            self._activation(inner) if bias is None else self._activation(inner, bias)
        )
        return out
