"""One layer, built from the features of the model section: norms, attention, MLP, residuals.

megatron-core builds and shards the parameters, so checkpoints use its names; the forward pass is written here, with
the attention hook of the pondering methods inside.

Shapes: s rows, b micro-batch, H hidden, h heads of this rank, g key/value heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megaponder.backbone import depth_attention, fused
from megaponder.backbone.freqkv import FreqCore
from megaponder.backbone.moe import Routed, moe_layer
from megaponder.backbone.norms import AllHeadsNorm, HeadBias
from megaponder.backbone.parts import Parts
from megaponder.config.model import ModelConfig
from megaponder.decoding import depth_sources, freqkv_blocks, moe_options

Kept = tuple[Tensor, ...]
Attend = Callable[[Tensor, Tensor, Tensor, Kept, Callable[..., Tensor]], tuple[Tensor, Kept]]
Reads = tuple[int, tuple[int, ...]]
"""(slots per token, the slots that are read): which rows the last layer finishes."""

ACTIVATIONS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "gelu": fused.gelu,
    "gelu_tanh": fused.gelu_tanh,
    "relu": fused.relu,
    "relu2": fused.relu2,
    "swiglu": fused.swiglu,
}


def layer_spec(model: ModelConfig, parts: Parts) -> ModuleSpec:
    """What megatron-core builds for a layer: the parts that the features require."""
    norm, column, names = IdentityOp, parts.column, {}
    experts = moe_options.read(model.moe)
    if model.norm_placement != "post":
        if parts.normed_column is not None:
            column = parts.normed_column
        else:
            # norms use Transformer Engine's checkpoint names, so both implementations load each other's files
            norm = parts.norm
            names = {
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            }
    attention = SelfAttentionSubmodules(
        linear_qkv=_with_bias(column, model.qkv_bias is True),
        core_attention=parts.core,
        q_layernorm=parts.norm if model.qk_norm == "head" else None,
        k_layernorm=parts.norm if model.qk_norm == "head" else None,
        linear_proj=_with_bias(parts.row, model.output_bias),
    )
    dense = MLPSubmodules(
        linear_fc1=_with_bias(column, model.mlp_bias), linear_fc2=_with_bias(parts.row, model.mlp_bias)
    )
    mlp, mlp_norm = ModuleSpec(module=MLP, submodules=dense), norm
    if experts is not None:  # the router reads what is normed, too
        mlp, mlp_norm = moe_layer(experts, parts), IdentityOp if model.norm_placement == "post" else parts.norm
        names.pop("pre_mlp_layernorm.", None)
    return ModuleSpec(
        module=PonderLayer,
        params={"model": model, "branch_norm": None if model.norm_placement == "pre" else parts.norm},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=PonderAttention,
                params={"attn_mask_type": AttnMaskType.causal, "model": model},
                submodules=attention,
            ),
            pre_mlp_layernorm=mlp_norm,
            mlp=mlp,
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


def _add(x: Tensor, out: Tensor, bias: Tensor | None, norm: nn.Module | None, stream: bool = False) -> Tensor:
    """The residual step: x + norm(out + bias), or norm(x + out + bias) if the stream itself is normed."""
    if norm is None or stream:
        x = x + out if bias is None else fused.add_biased(x, out, bias)
        return x if norm is None else norm(x)
    return x + norm(out if bias is None else out + bias)


_rotated = fused.one_kernel(fused.rotated)


class PonderAttention(SelfAttention):
    """megatron-core's self-attention with `attend(q, k, v, kept, core) -> (output, kept)` inside."""

    q_layernorm: Any
    k_layernorm: Any

    def __init__(self, *args: Any, model: ModelConfig, **kwargs: Any):
        super().__init__(*args, **kwargs)
        heads, groups, tp = model.num_heads, model.num_kv_heads, self.pg_collection.tp
        assert heads and groups
        if model.qk_norm == "all":
            self.q_layernorm, self.k_layernorm = (AllHeadsNorm(self.config, n, tp) for n in (heads, groups))
        self.q_bias: HeadBias | None = None
        if model.qkv_bias == "qk":
            self.q_bias, self.k_bias = (HeadBias(self.config, n, tp) for n in (heads, groups))
        self._adjacent, self._norms_rotated = model.rotary_pairs == "adjacent", model.qk_norm == "rotated"
        self._depth = depth_sources.read(model.depth_attention)
        self._freqkv = freqkv_blocks.read(model.freqkv)

    def forward(
        self,
        x_sbh: Tensor,
        rotary: Tensor | None,
        attend: Attend,
        kept: Kept,
        reads: Reads | None = None,
        sources: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor | None, Kept, Kept]:
        """Output without its bias, the bias, what the method keeps, and what Depth-Attention gives to later layers.

        `sources`: what it has from earlier ones, keys and values [s, b, g, d] in turn.  It gives its own, then the
        sources once more: later layers take these, so that gradients come in one by one.
        """
        qkv, _ = self.linear_qkv(x_sbh)
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        core: Callable[..., Tensor] = self.core_attention
        if self._freqkv is not None and len(qkv) > self._freqkv.capacity:
            assert rotary is not None
            core, rotary = FreqCore(self._freqkv, core, rotary, self._adjacent), None  # it rotates them itself
        q, k, v = self._heads(qkv, rotary, heads, groups)
        made: Kept = ()
        if self._depth is not None:
            k, v = k.contiguous(), v.contiguous()  # later layers read them, too
            mixed, *passed = depth_attention.mix(self._depth, q, k, v, sources)
            made, v = (k, v if self._depth.values == "raw" else mixed, *passed), mixed
        out, kept = attend(q, k, v, kept, core)
        out = read_rows(out, reads)
        projected, bias = self.linear_proj(out.reshape(*out.shape[:2], -1))
        return projected, bias, kept, made

    def _heads(self, qkv: Tensor, rotary: Tensor | None, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, h, d], keys and values [s, b, g, d] at their positions."""
        if rotary is not None and self.q_layernorm is None and self.q_bias is None:
            q, k, v = fused.split_rotated(qkv, rotary, heads, groups, self._adjacent)
        else:
            q, k, v = fused.split(qkv, heads, groups)
            if self.q_bias is not None:
                q, k = self.q_bias(q), self.k_bias(k)
            if self.q_layernorm is not None:
                q, k = self.q_layernorm(q), self.k_layernorm(k)
            if rotary is not None:
                q, k = _rotated(q, rotary, self._adjacent), _rotated(k, rotary, self._adjacent)
        if self._norms_rotated:
            q, k = fused.unit(q), fused.unit(k)
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
        self.parallel_residual, self._stream = model.parallel_residual, model.norm_placement == "stream"
        self._activation, self._moe = ACTIVATIONS[str(model.activation)], bool(model.moe)

    def forward(
        self,
        x_sbh: Tensor,
        rotary: Tensor | None,
        attend: Attend,
        kept: Kept,
        reads: Reads | None = None,
        sources: Sequence[Tensor] = (),
        counted_sb: Tensor | None = None,
        disciplines_b: Tensor | None = None,
        steps: Sequence[int] = (0,),
    ) -> tuple[Tensor, Kept, Kept, Routed | None]:
        """Rows in, rows out; with `reads`, all rows serve as keys and only the rows that are read come out.

        Also what the method keeps, what Depth-Attention gives to later layers (see `PonderAttention.forward`), and what
        a mixture's router did, for which `counted_sb` says what share of a token each row is, `disciplines_b` what it
        should have done, and `steps` which one it is (`PonderRouter.forward`).
        """
        given = (rotary, attend, kept, reads, sources)
        if counted_sb is not None and reads is not None:
            counted_sb = read_rows(counted_sb, reads) * (reads[0] / len(reads[1]))
            steps = tuple(steps[i] for i in reads[1])
        about = counted_sb, disciplines_b, steps
        if not self.parallel_residual:
            attended, bias, kept, made = self.self_attention(self.input_layernorm(x_sbh), *given)
            x_sbh = _add(read_rows(x_sbh, reads), attended, bias, self.post_self_attn_layernorm, self._stream)
            inner, inner_bias, routed = self._mlp(x_sbh, *about)
            return _add(x_sbh, inner, inner_bias, self.post_mlp_layernorm, self._stream), kept, made, routed
        x_sbh, for_attention, for_mlp = fused.thrice(x_sbh)
        attended, bias, kept, made = self.self_attention(self.input_layernorm(for_attention), *given)
        x_sbh = read_rows(x_sbh, reads)
        inner, inner_bias, routed = self._mlp(read_rows(for_mlp, reads), *about)
        if bias is None or inner_bias is None or self.post_mlp_layernorm is not None:
            x_sbh = _add(x_sbh, attended, bias, self.post_self_attn_layernorm)
            return _add(x_sbh, inner, inner_bias, self.post_mlp_layernorm), kept, made, routed
        return fused.add_biased_twice(x_sbh, attended, bias, inner, inner_bias), kept, made, routed

    def _mlp(
        self, x_sbh: Tensor, counted_sb: Tensor | None, disciplines_b: Tensor | None, steps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None, Routed | None]:
        """megatron-core's MLP with the activation as one kernel; its output bias is left to the residual."""
        if self._moe:
            mixed, routed = self.mlp(self.pre_mlp_layernorm(x_sbh), counted_sb, disciplines_b, steps)
            return mixed, None, routed
        inner, bias = self.mlp.linear_fc1(self.pre_mlp_layernorm(x_sbh))
        out, bias = self.mlp.linear_fc2(self._activation(inner, bias))
        return out, bias, None
