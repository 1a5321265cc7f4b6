"""Implementations of a layer's parts: PyTorch's (local) or Transformer Engine's (te)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megaponder.backbone.attention import SdpaCore
from megaponder.backbone.config import use_te, uses_graphs, why_no_graphs
from megaponder.backbone.context import Context
from megaponder.backbone.documents import Documents
from megaponder.backbone.norms import local_norm
from megaponder.config.schema import RunConfig


@dataclass(frozen=True)
class Parts:
    """Which implementation of each part runs."""

    column: Any
    row: Any
    core: Any
    norm: Any
    normed_column: Any | None = None
    """A norm and `column` in one; None: they are separate."""
    grouped: tuple[Any, Any] | None = None
    """`column` and `row` of all experts of a rank at once; None: one expert after the other."""


def _packed(edges: Tensor, rows: int) -> PackedSeqParams:
    """Documents of sequences of `rows` rows, joined; those of no rows at the end are places that are not needed.

    The longest document is not looked up: the host would wait for it, and a captured pass must not depend on it.
    """
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges, max_seqlen_q=rows, max_seqlen_kv=rows
    )


def with_plain_strides(x: Tensor) -> Tensor:
    """x, where a dimension of size 1 has the stride that follows from the shape.

    It may have any, after a compiled kernel for example, and Transformer Engine refuses keys and values that differ in
    it, however the rows lie.
    """
    return x.contiguous().view(-1).view(x.shape) if 1 in x.shape else x


def _te_parts() -> Parts:
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelGroupedLinear,
        TEColumnParallelLinear,
        TEDotProductAttention,
        TELayerNormColumnParallelLinear,
        TENorm,
        TERowParallelGroupedLinear,
        TERowParallelLinear,
    )

    class TeCore(TEDotProductAttention):
        """Transformer Engine's fused attention; calls without a kernel go to PyTorch's: a key bias, a window of tokens
        that have several rows each, or documents with a window or where kernels must be deterministic."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self._sdpa = SdpaCore(self.config, softmax_scale=kwargs.get("softmax_scale"))
            for kernel in (self.flash_attention, self.fused_attention, self.unfused_attention):
                # no dropout, so no fork of the random state, which a CUDA graph could not capture
                kernel.attention_dropout_ctx = nullcontext

        def forward(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            key_bias: Tensor | None = None,
            slots: int = 1,
            documents: Documents | None = None,
            context: Context | None = None,
        ) -> Tensor:
            if key_bias is not None or q.shape[0] != k.shape[0] or (self._sdpa.window and slots > 1):
                return self._sdpa(q, k, v, key_bias, slots, documents, context)
            if context is not None:
                assert documents is not None
                if documents.apart or self._sdpa.window:
                    return self._sdpa(q, k, v, None, slots, documents, context)
                documents = None  # its kernels pass keys and values around the ranks themselves
            if documents is not None:
                if self._sdpa.window or self.config.deterministic_mode:
                    return self._sdpa(q, k, v, None, slots, documents)
                rows, b, heads = q.shape[:3]
                joined = (with_plain_strides(x.transpose(0, 1).flatten(0, 1)) for x in (q, k, v))
                packed = _packed(documents.edges(slots), rows)
                out = super().forward(*joined, None, AttnMaskType.causal, packed_seq_params=packed)
                return out.view(b, rows, heads, -1).transpose(0, 1)
            out = super().forward(*map(with_plain_strides, (q, k, v)), None, AttnMaskType.causal)
            return out.view(*q.shape[:2], q.shape[2], -1)

        def bottom_right(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.config.deterministic_mode:
                return self._sdpa.bottom_right(q, k, v)
            out = super().forward(*map(with_plain_strides, (q, k, v)), None, AttnMaskType.causal_bottom_right)
            return out.view(*q.shape[:2], q.shape[2], -1)

        def merged(self, *args: Any) -> Tensor:
            return self._sdpa.merged(*args)

    grouped = TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
    return Parts(TEColumnParallelLinear, TERowParallelLinear, TeCore, TENorm, TELayerNormColumnParallelLinear, grouped)


def parts(config: TransformerConfig, te: bool) -> Parts:
    """The implementations for a config."""
    if te:
        return _te_parts()
    return Parts(ColumnParallelLinear, RowParallelLinear, SdpaCore, local_norm(config))


def implementations(cfg: RunConfig) -> str:
    """One line for the log: which implementation of each part runs."""
    if use_te(cfg.precision):
        from importlib.metadata import version

        layers = f"Transformer Engine {version('transformer-engine')} (norms fused into linear layers)"
        attention = "Transformer Engine's fused kernels"
    else:
        layers, attention = f"PyTorch {torch.__version__}", "PyTorch's fused kernels"
    numbers = {"fp32": "FP32", "bf16": "BF16"}[cfg.precision.dtype]
    if cfg.precision.fp8 != "none":
        numbers = f"FP8 ({cfg.precision.fp8} scaling) and {numbers}"
    reason = why_no_graphs(cfg) or "precision.cuda_graphs is false"
    passes = "captured as CUDA graphs" if uses_graphs(cfg) else f"not captured: {reason}"
    return f"Layers: {layers}; attention: {attention}; numbers: {numbers}; passes: {passes}."
