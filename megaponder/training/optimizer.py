"""AdamW over the engine's one DistributedDataParallel wrapper, by megatron-core."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, ParamGroupOverride, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megaponder.config.schema import RunConfig


def build_optimizer(cfg: RunConfig, ddp: DistributedDataParallel) -> MegatronOptimizer:
    """AdamW with FP32 moments and, in BF16 runs, FP32 master weights; biases and norms are not decayed.

    megatron-core takes the fused kernel of Transformer Engine or NVIDIA apex where one is installed, else torch's.
    """
    options = cfg.optimizer
    bf16 = cfg.precision.dtype == "bf16"
    not_decayed = ParamKey(name="*.bias", predicate=ParamPredicate("vector", lambda p: p.dim() <= 1))
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.beta1,
            adam_beta2=options.beta2,
            adam_eps=options.eps,
            clip_grad=options.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=cfg.parallel.distributed_optimizer,
            overlap_param_gather=cfg.parallel.overlap_param_gather,
        ),
        [ddp],
        config_overrides={not_decayed: ParamGroupOverride(wd_mult=0.0)},
        use_gloo_process_groups=False,
    )


def set_lr(optimizer: MegatronOptimizer, cfg: RunConfig, lr: float) -> None:
    """Learning rate of the coming step; groups that are not decayed keep a decay of zero."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = cfg.optimizer.weight_decay * group["wd_mult"]
