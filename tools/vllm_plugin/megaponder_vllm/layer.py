"""One block of the backbone, with vLLM's tensor-parallel layers and one attention, hence one cache, for each pass.

Shapes: r rows (tokens of all requests of a step), H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope


def make_norm(config: Any, width: int) -> nn.Module:
    """RMSNorm, or LayerNorm with bias."""
    return (RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm)(width, eps=config.norm_eps)


class Layer(nn.Module):
    """One block; `forward` runs it in one of its passes."""

    def __init__(self, config: Any, index: int, passes: int, vllm_config: VllmConfig):
        super().__init__()
        ranks, quant, name = get_tensor_model_parallel_world_size(), vllm_config.quant_config, f"model.layers.{index}"
        width, self.size = config.hidden_size, config.head_size
        self.heads, self.groups = config.num_attention_heads // ranks, max(1, config.num_key_value_heads // ranks)
        self.parallel, self.activation = config.parallel_residual, config.activation
        self.qkv_proj = QKVParallelLinear(
            width,
            self.size,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.qkv_bias,
            quant_config=quant,
            prefix=f"{name}.self_attn.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.size,
            width,
            bias=config.output_bias,
            quant_config=quant,
            prefix=f"{name}.self_attn.o_proj",
        )
        # a cache belongs to an attention by its name, which holds one number
        self.attention = nn.ModuleList(
            Attention(
                self.heads,
                self.size,
                self.size**-0.5,
                num_kv_heads=self.groups,
                cache_config=vllm_config.cache_config,
                quant_config=quant,
                prefix=f"model.layers.{p * config.num_hidden_layers + index}.self_attn.attn",
            )
            for p in range(passes)
        )
        rope = {
            "rope_type": "default",
            "rope_theta": config.rotary_base,
            "partial_rotary_factor": config.rotary_fraction,
        }
        self.rope = (
            get_rope(self.size, max_position=config.max_position_embeddings, rope_parameters=rope)
            if config.positions == "rotary"
            else None
        )
        for side in ("gate_proj", "up_proj") if self.activation == "swiglu" else ("up_proj",):
            column = ColumnParallelLinear(
                width, config.intermediate_size, bias=config.mlp_bias, quant_config=quant, prefix=f"{name}.mlp.{side}"
            )
            setattr(self, side, column)
        self.down_proj = RowParallelLinear(
            config.intermediate_size, width, bias=config.mlp_bias, quant_config=quant, prefix=f"{name}.mlp.down_proj"
        )
        self.input_layernorm, self.post_attention_layernorm = make_norm(config, width), make_norm(config, width)
        sandwich, by_head = config.norm_placement == "sandwich", config.qk_norm == "head"
        self.input_layernorm_2 = make_norm(config, width) if sandwich else nn.Identity()
        self.post_attention_layernorm_2 = make_norm(config, width) if sandwich else nn.Identity()
        self.q_norm = make_norm(config, self.size) if by_head else nn.Identity()
        self.k_norm = make_norm(config, self.size) if by_head else nn.Identity()

    def forward(
        self, positions: Tensor, x: Tensor, index: int, active: Tensor | None, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Rows [r, H] after pass `index`, and their keys and values; those of rows not `active` [r, 1] are `before`."""
        widths = [self.heads * self.size, self.groups * self.size, self.groups * self.size]
        q, k, v = self.qkv_proj(self.input_layernorm(x))[0].split(widths, dim=-1)
        q, k = self._by_head(self.q_norm, q), self._by_head(self.k_norm, k)
        if self.rope is not None:
            q, k = self.rope(positions, q, k)
        if active is not None and before is not None:
            k, v = torch.where(active, k, before[0]), torch.where(active, v, before[1])
        attended = self.input_layernorm_2(self.o_proj(self.attention[index](q, k, v))[0])
        y = x if self.parallel else x + attended
        inner = self.post_attention_layernorm_2(self._mlp(self.post_attention_layernorm(y)))
        return (x + attended if self.parallel else y) + inner, (k, v)

    def _by_head(self, norm: nn.Module, x: Tensor) -> Tensor:
        if isinstance(norm, nn.Identity):
            return x
        return norm(x.view(*x.shape[:-1], -1, self.size).contiguous()).flatten(-2)

    def _mlp(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            inner = F.silu(self.gate_proj(x)[0]) * self.up_proj(x)[0]
        else:
            inner = F.gelu(self.up_proj(x)[0], approximate={"gelu": "none", "gelu_tanh": "tanh"}[self.activation])
        return self.down_proj(inner)[0]
