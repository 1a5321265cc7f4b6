"""AdamW, or Muon with AdamW, over the engine's one DistributedDataParallel wrapper."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    ParamGroupOverride,
    get_megatron_optimizer,
)
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import nn

from megaponder.config.schema import RunConfig, TrainConfig
from megaponder.engine.transfer import transfer
from megaponder.engine.zero import Updates
from megaponder.ponder.base import PARAMETER_PREFIX
from megaponder.training.muon import Muon, Pieces, owners, send


def build_optimizer(cfg: RunConfig, ddp: DistributedDataParallel) -> MegatronOptimizer:
    """AdamW with FP32 moments and, in BF16 runs, FP32 master weights; biases and norms are not decayed.

    With `optimizer.kind: muon` the matrices of the layers have Muon instead, and all else keeps AdamW.
    megatron-core takes the fused kernel of Transformer Engine or NVIDIA apex where one is installed, else torch's.
    """
    leave_compiler_alone()
    options = cfg.optimizer
    bf16 = cfg.precision.dtype == "bf16"
    not_decayed = ParamKey(name="*.bias", predicate=ParamPredicate("vector", lambda p: p.dim() <= 1))
    overrides = {not_decayed: ParamGroupOverride(wd_mult=0.0)}
    if cfg.train.method_only_steps:  # groups of their own, so that `set_lr` can tell them from the backbone's
        overrides[ParamKey(name=f"*{PARAMETER_PREFIX}*")] = ParamGroupOverride(of_method=True)
    matrices = _matrices(cfg, ddp.module) if options.kind == "muon" else {}
    rates = transfer(cfg, ddp.module.method).rates(ddp.module, matrices)
    for rate in sorted({rate for rate in rates.values() if rate != 1}):
        chosen = ParamPredicate(f"rate {rate}", lambda p, rate=rate: rates[p] == rate)
        overrides[ParamKey(predicate=chosen)] = ParamGroupOverride(lr_mult=rate, wd_mult=1 / rate)
    with _left_out(matrices):
        adam = get_megatron_optimizer(
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
                use_distributed_optimizer=cfg.cuts_buffers,
                overlap_param_gather=cfg.gathers_ahead,
            ),
            [ddp],
            config_overrides=overrides,
            use_gloo_process_groups=False,
        )
    if not matrices:
        return adam
    return ChainedOptimizer([_muon(cfg, matrices, rates, adam.config), *getattr(adam, "chained_optimizers", [adam])])


def _matrices(cfg: RunConfig, stage: nn.Module) -> dict[nn.Parameter, Pieces]:
    """The matrices of this rank's layers, and what each holds in the whole model."""
    m, tensor = cfg.model, cfg.parallel.tensor
    assert m.num_heads and m.num_kv_heads and m.head_size and m.ffn_size
    found = {}
    for name, p in stage.named_parameters():
        if not name.startswith("decoder.") or p.dim() != 2 or not p.requires_grad:
            continue
        found[p] = Pieces()
        if name.endswith("linear_qkv.weight"):
            found[p] = Pieces(m.num_kv_heads, (m.num_heads // m.num_kv_heads * m.head_size, m.head_size, m.head_size))
        elif name.endswith("linear_fc1.weight") and m.gated:
            found[p] = Pieces(tensor, (m.ffn_size // tensor,) * 2)
    return found


@contextmanager
def _left_out(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """megatron-core makes no optimizer for what has no gradient."""
    for p in parameters:
        p.requires_grad = False
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad = True


def _muon(
    cfg: RunConfig, matrices: dict[nn.Parameter, Pieces], rates: dict[nn.Parameter, float], config: OptimizerConfig
) -> MegatronOptimizer:
    """Muon over these parameters, inside megatron-core's wrapper for their format."""
    alike = parallel_state.get_data_parallel_group(with_context_parallel=True)
    shared_out = owners(matrices, alike.size()) if cfg.parallel.distributed_optimizer else {}
    groups = []
    for pieces in dict.fromkeys(matrices.values()):
        every = [p for p, its in matrices.items() if its == pieces]
        rate = rates[every[0]]  # that of all matrices of the layers
        own = [p for p in every if shared_out.get(p, alike.rank()) == alike.rank()]
        groups.append({"params": own, "pieces": pieces, "lr_mult": rate, "wd_mult": 1 / rate})
    group = parallel_state.get_tensor_model_parallel_group()
    inner = Muon(groups, config.lr, cfg.optimizer.momentum, config.params_dtype, group)
    if config.bf16:
        muon = Float16OptimizerWithFloat16Params(inner, config, None, None)
    else:
        muon = FP32Optimizer(inner, config, None)
    muon.grad_stats_parallel_group, muon.tp_group = parallel_state.get_model_parallel_group(), group
    if shared_out:
        inner.shared_out, muon.grad_stats_parallel_group = True, torch.distributed.group.WORLD
        step = muon.step_with_ready_grads

        def step_and_send() -> bool:
            done: bool = step()
            send(shared_out, alike)
            return done

        muon.step_with_ready_grads = step_and_send
    return muon


def leave_compiler_alone() -> None:
    """Let PyTorch's optimizers not import its compiler: they do, for two seconds, only to tell it to skip them."""
    for method in vars(torch.optim.Optimizer).values():
        function = getattr(method, "__wrapped__", None)
        if function is not None and not hasattr(function, "__dynamo_disable"):
            setattr(function, "__dynamo_disable", function)
    step: Any = torch.optim.Adam.step
    if step.__code__.co_name == "_use_grad":  # not yet ours, nor that of an optimizer which was built elsewhere

        @functools.wraps(step)
        def without_compiler(self: torch.optim.Adam, *args: Any, **kwargs: Any) -> Any:
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return step.__wrapped__(self, *args, **kwargs)

        torch.optim.Adam.step = without_compiler  # type: ignore[method-assign]


def set_lr(optimizer: Updates, cfg: RunConfig, lr: float, step: int) -> None:
    """Learning rate of the next step; groups without weight decay keep a decay of zero.

    Groups with a rate of their own (`engine.transfer`) have it as a factor, `lr_mult`.

    While only the method's parameters are trained, the others have a rate of zero, which stops their decay too.
    """
    alone = method_only(cfg.train, step)
    own = cfg.train.method_lr if alone and cfg.train.method_lr is not None else lr
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if alone and not group.get("of_method", False) else own * group["lr_mult"]
        group["weight_decay"] = cfg.optimizer.weight_decay * group["wd_mult"]


def method_only(train: TrainConfig, step: int) -> bool:
    """Whether only the method's own parameters change in this step."""
    return step <= train.method_only_steps


def drop_backbone_gradients(stage: nn.Module) -> None:
    """Zero every gradient except those of the method's own parameters, after reduction and before clipping.

    The others then count neither in the gradient norm nor in Adam's moments, and they stay bit-equal.
    """
    for name, parameter in stage.named_parameters():
        if parameter.requires_grad and not name.startswith(PARAMETER_PREFIX):
            # the buffer that the optimizer, or its shard, reads
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
