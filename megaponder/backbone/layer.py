"""One transformer layer: two residual steps, or GPT-NeoX's parallel residual."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megaponder.backbone.attention import Attend, Kept, Reads, read_rows


def _with_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias


class PonderLayer(TransformerLayer):
    """megatron-core's layer (its parameters, its checkpoint names) with the attention hook passed through.

    Where Transformer Engine fuses the norms into the projections, `input_layernorm` and `pre_mlp_layernorm` are
    identities and the same forward holds.
    """

    def __init__(self, *args: Any, parallel_residual: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parallel_residual = parallel_residual

    def forward(
        self, x_sbh: Tensor, rotary: Tensor | None, attend: Attend, kept: Kept, reads: Reads | None = None
    ) -> tuple[Tensor, Kept]:
        """Rows in, rows out; with `reads`, all rows serve as keys and only the rows that are read come out."""
        attended, bias, kept = self.self_attention(self.input_layernorm(x_sbh), rotary, attend, kept, reads)
        x_sbh = read_rows(x_sbh, reads)
        attended = _with_bias(attended, bias)
        if self.parallel_residual:
            return x_sbh + attended + _with_bias(*self.mlp(self.pre_mlp_layernorm(x_sbh))), kept
        x_sbh = x_sbh + attended
        return x_sbh + _with_bias(*self.mlp(self.pre_mlp_layernorm(x_sbh))), kept
