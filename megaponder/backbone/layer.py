"""One layer, built from the features of the model section: norms, attention, MLP, residuals.

megatron-core builds and shards the parameters, so checkpoints use its names; the forward pass is written here, with
the attention hook of the pondering methods inside.

Shapes: s rows, b micro-batch, H hidden, h heads of this rank, g key/value heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megaponder.backbone import fused
from megaponder.backbone.parts import Parts
from megaponder.config.model import ModelConfig

Kept = tuple[Tensor, ...]
Attend = Callable[[Tensor, Tensor, Tensor, Kept, Callable[..., Tensor]], tuple[Tensor, Kept]]
Reads = tuple[int, tuple[int, ...]]
"""(slots per token, the slots that are read): which rows the last layer finishes."""

ACTIVATIONS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "gelu": fused.gelu,
    "gelu_tanh": fused.gelu_tanh,
    "swiglu": fused.swiglu,
}


def layer_spec(model: ModelConfig, parts: Parts) -> ModuleSpec:
    """What megatron-core builds for a layer: the parts that the features require."""
    norm, names = IdentityOp, {}
    if not parts.fused_norm:
        # norms use Transformer Engine's checkpoint names, so both implementations load each other's files
        norm = parts.norm
        names = {
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
    attention = SelfAttentionSubmodules(
        linear_qkv=_with_bias(parts.column, model.qkv_bias),
        core_attention=parts.core,
        q_layernorm=parts.norm if model.qk_norm == "head" else None,
        k_layernorm=parts.norm if model.qk_norm == "head" else None,
        linear_proj=_with_bias(parts.row, model.output_bias),
    )
    mlp = MLPSubmodules(
        linear_fc1=_with_bias(parts.column, model.mlp_bias), linear_fc2=_with_bias(parts.row, model.mlp_bias)
    )
    return ModuleSpec(
        module=PonderLayer,
        params={"model": model, "branch_norm": parts.norm if model.norm_placement == "sandwich" else None},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=PonderAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(module=MLP, submodules=mlp),
            sharded_state_dict_keys_map=names,
        ),
    )


def _with_bias(linear: Any, bias: bool | None) -> Any:
    """The class of a linear layer, with or without bias whatever megatron-core requests: it has one setting for all."""

    class Linear(linear):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"bias": bool(bias)})

    Linear.__name__ = Linear.__qualname__ = linear.__name__
    return Linear


def read_rows(x: Tensor, reads: Reads | None) -> Tensor:
    """Rows of the slots that are read, token-major: [tokens * slots, ...] -> [tokens * len(read), ...]."""
    if reads is None:
        return x
    slots, read = reads
    x = x.unflatten(0, (-1, slots))
    return torch.stack([x[:, i] for i in read], dim=1).flatten(0, 1)


def _add(x: Tensor, out: Tensor, bias: Tensor | None, norm: nn.Module | None) -> Tensor:
    """The residual step: x + norm(out + bias)."""
    if norm is not None:
        return x + norm(out if bias is None else out + bias)
    return x + out if bias is None else fused.add_biased(x, out, bias)


_rotated = fused.one_kernel(fused.rotated)


class PonderAttention(SelfAttention):
    """megatron-core's self-attention with `attend(q, k, v, kept, core) -> (output, kept)` inside."""

    def forward(
        self, x_sbh: Tensor, rotary: Tensor | None, attend: Attend, kept: Kept, reads: Reads | None = None
    ) -> tuple[Tensor, Tensor | None, Kept]:
        """Output without its bias, the bias, and what the method keeps."""
        qkv, _ = self.linear_qkv(x_sbh)
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        q, k, v = self._heads(qkv, rotary, heads, groups)
        out, kept = attend(q, k, v, kept, self.core_attention)
        out = read_rows(out, reads)
        projected, bias = self.linear_proj(out.reshape(*out.shape[:2], -1))
        return projected, bias, kept

    def _heads(self, qkv: Tensor, rotary: Tensor | None, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, h, d], keys and values [s, b, g, d] at their positions."""
        if rotary is not None and self.q_layernorm is None:
            return fused.split_rotated(qkv, rotary, heads, groups)
        q, k, v = fused.split(qkv, heads, groups)
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if rotary is not None:
            q, k = _rotated(q, rotary), _rotated(k, rotary)
        return q, k, v


class PonderLayer(TransformerLayer):
    """megatron-core's layer (its parameters, its checkpoint names) with the attention hook passed through.

    If Transformer Engine fuses the norms into the projections, `input_layernorm` and `pre_mlp_layernorm` are identities
    and the same forward applies.
    """

    def __init__(self, *args: Any, model: ModelConfig, branch_norm: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.post_self_attn_layernorm = self.post_mlp_layernorm = None
        if branch_norm is not None:
            self.post_self_attn_layernorm, self.post_mlp_layernorm = (
                branch_norm(config=self.config, hidden_size=self.config.hidden_size, eps=self.config.layernorm_epsilon)
                for _ in range(2)
            )
        self.parallel_residual = model.parallel_residual
        self._activation = ACTIVATIONS[str(model.activation)]

    def forward(
        self, x_sbh: Tensor, rotary: Tensor | None, attend: Attend, kept: Kept, reads: Reads | None = None
    ) -> tuple[Tensor, Kept]:
        """Rows in, rows out; with `reads`, all rows serve as keys and only the rows that are read come out."""
        if not self.parallel_residual:
            attended, bias, kept = self.self_attention(self.input_layernorm(x_sbh), rotary, attend, kept, reads)
            x_sbh = _add(read_rows(x_sbh, reads), attended, bias, self.post_self_attn_layernorm)
            return _add(x_sbh, *self._mlp(x_sbh), self.post_mlp_layernorm), kept
        x_sbh, for_attention, for_mlp = fused.thrice(x_sbh)
        attended, bias, kept = self.self_attention(self.input_layernorm(for_attention), rotary, attend, kept, reads)
        x_sbh = read_rows(x_sbh, reads)
        inner, inner_bias = self._mlp(read_rows(for_mlp, reads))
        if bias is None or inner_bias is None or self.post_mlp_layernorm is not None:
            x_sbh = _add(x_sbh, attended, bias, self.post_self_attn_layernorm)
            return _add(x_sbh, inner, inner_bias, self.post_mlp_layernorm), kept
        return fused.add_biased_twice(x_sbh, attended, bias, inner, inner_bias), kept

    def _mlp(self, x_sbh: Tensor) -> tuple[Tensor, Tensor | None]:
        """megatron-core's MLP with the activation as one kernel; its output bias is left to the residual."""
        inner, bias = self.mlp.linear_fc1(self.pre_mlp_layernorm(x_sbh))
        out: tuple[Tensor, Tensor | None] = self.mlp.linear_fc2(self._activation(inner, bias))
        return out
