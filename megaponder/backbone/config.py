"""From the model section to megatron-core's TransformerConfig."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from megaponder.config.schema import ParallelConfig, PrecisionConfig, RunConfig
from megaponder.config.stages import stage_sizes
from megaponder.decoding import moe_options


def dtype_of(precision: PrecisionConfig) -> torch.dtype:
    """Format of parameters, activations and pipeline messages."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision.dtype]


def use_te(precision: PrecisionConfig) -> bool:
    """Whether Transformer Engine's layers are used: on request, or with `auto` if it is installed and there is a GPU.

    `auto` keeps FP32 runs on PyTorch: Transformer Engine multiplies FP32 matrices in TF32 (gradients 1e-4 off).
    """
    if precision.implementation != "auto":
        return precision.implementation == "te"
    if precision.dtype == "fp32":
        return False
    from megatron.core.transformer.transformer_block import HAVE_TE

    return bool(HAVE_TE and torch.version.cuda and torch.cuda.is_available())


def why_no_graphs(cfg: RunConfig) -> str:
    """The reason why passes of this run cannot be captured as CUDA graphs; empty if they can."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if cfg.parallel.overlap_grad_reduce or cfg.gathers_ahead:
        return "overlapped communication is started by hooks, which captured passes do not run"
    if cfg.train.engine == "deepspeed":
        return "DeepSpeed reduces and gathers by hooks, which captured passes do not run"
    if cfg.parallel.offload_passes:
        return "with parallel.offload_passes what a layer keeps moves to main memory"
    if cfg.parallel.context > 1:
        return "ranks of parallel.context exchange keys and values inside of a pass"
    if cfg.model.moe:
        return "with model.moe the number of rows of an expert is known only when it is routed"
    if cfg.train.only:
        return "captured passes with weights that are not trained are not built"
    return ""


def uses_graphs(cfg: RunConfig) -> bool:
    """Whether passes are captured as CUDA graphs."""
    wish = cfg.precision.cuda_graphs
    return bool(wish) and not why_no_graphs(cfg)


def _has_apex_kernel() -> bool:
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401
    except ImportError:
        return False
    return True


def _grad_accum_fusion(cfg: RunConfig) -> bool:
    """GEMMs that add weight gradients to the FP32 buffers: Transformer Engine's own, or NVIDIA apex's if installed.

    cuBLAS requires aligned buffers, which the distributed optimizer provides.
    """
    if cfg.precision.grad_accum_fusion != "auto":
        return bool(cfg.precision.grad_accum_fusion)
    buffers = cfg.cuts_buffers and cfg.train.engine == "megatron"
    return buffers and (use_te(cfg.precision) or _has_apex_kernel())


def head_config(config: TransformerConfig) -> TransformerConfig:
    """For megatron-core's own linear layer, which only supports apex's kernel."""
    config = copy.copy(config)
    config.gradient_accumulation_fusion = config.gradient_accumulation_fusion and _has_apex_kernel()
    return config


def deallocates(parallel: ParallelConfig) -> bool:
    """Free a stage's output once sent: never on gloo, which may still be reading it (corruption was observed)."""
    if parallel.deallocate_pipeline_outputs is None:
        return torch.cuda.is_available()
    return parallel.deallocate_pipeline_outputs


def _stages(cfg: RunConfig) -> list[list[str]]:
    """megatron-core's description of stages with different numbers of layers."""
    layout = [["decoder"] * size for size in stage_sizes(cfg)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def transformer_config(cfg: RunConfig) -> TransformerConfig:
    """megatron-core's view of a resolved run configuration."""
    m, par, dtype = cfg.model, cfg.parallel, dtype_of(cfg.precision)
    no_init = lambda weight: None  # noqa: E731  backbone.init sets weights by name, equal in every layout
    options: dict[str, Any] = dict(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        num_attention_heads=m.num_heads,
        num_query_groups=m.num_kv_heads,
        ffn_hidden_size=m.ffn_size,
        kv_channels=m.head_size,
        qk_layernorm=m.qk_norm == "head",  # replicated weights: their gradients are summed over the tensor group
        window_size=(m.attention_window - 1, 0) if m.attention_window else None,  # rows before and after a row
        gated_linear_unit=m.gated,  # activation and biases: see backbone.layer
        normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[str(m.norm)],
        layernorm_epsilon=m.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=no_init,
        output_layer_init_method=no_init,
        embedding_init_method=no_init,
        use_cpu_initialization=not torch.cuda.is_available(),
        tensor_model_parallel_size=par.tensor,
        pipeline_model_parallel_size=par.pipeline,
        context_parallel_size=par.context,
        cp_comm_type="p2p",  # of Transformer Engine's attention
        pipeline_model_parallel_layout=_stages(cfg) if par.stage_layers else None,
        sequence_parallel=par.sequence,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        calculate_per_token_loss=True,  # sums, divided by one global token count: see engine.step
        deallocate_pipeline_outputs=deallocates(par),
        gradient_accumulation_fusion=_grad_accum_fusion(cfg),
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        deterministic_mode=cfg.train.deterministic,
    )
    if (experts := moe_options.read(m.moe)) is not None:
        options |= _moe_options(cfg, experts)
    return TransformerConfig(**options)


def _moe_options(cfg: RunConfig, experts: moe_options.Experts) -> dict[str, Any]:
    split, te = cfg.parallel.expert_ranks, use_te(cfg.precision)
    # where a rank has all experts there is nothing to exchange; split ones over gloo, which gathers equal parts only
    gathers = cfg.parallel.experts * split == 1 or (split > 1 and not torch.cuda.is_available())
    return dict(
        num_moe_experts=experts.experts,
        moe_ffn_hidden_size=cfg.model.ffn_size,
        moe_shared_expert_intermediate_size=experts.shared_ffn or None,
        moe_router_topk=experts.top_k,
        moe_router_pre_softmax=not experts.renormalise,
        moe_router_score_function=experts.score,
        moe_router_load_balancing_type="none",  # see backbone.moe
        moe_router_dtype="fp32",
        moe_grouped_gemm=te,
        moe_permute_fusion=te,
        moe_token_dispatcher_type="allgather" if gathers else "alltoall",
        expert_model_parallel_size=cfg.parallel.experts,
        expert_tensor_parallel_size=split,
        add_bias_linear=False,  # of experts and router; attention has its own settings
        activation_func=F.silu,
        bias_activation_fusion=te,
    )
