"""Rules on the second engine: what DeepSpeed has, and fields that belong to it alone."""

from __future__ import annotations

from typing import Any

from megaponder.config.rules.case import Case, Rule, require


def fields_have_their_engine(c: Case) -> None:
    """ZeRO's stage and offload would silently do nothing with megatron-core."""
    par = c.cfg.parallel
    if c.cfg.train.engine != "deepspeed":
        fix = "or set train.engine: deepspeed"
        rule = "it belongs to train.engine: deepspeed"
        require(par.zero_stage is None, "parallel.zero_stage", par.zero_stage, rule, f"leave it out, {fix}")
        require(par.offload == "none", "parallel.offload", par.offload, rule, f"use none, {fix}")


def deepspeed_is_installed(c: Case) -> None:
    """It is an extra."""
    ok = c.cfg.train.engine != "deepspeed" or c.machine is None or c.machine.deepspeed
    fix = "install megaponder[deepspeed], or use megatron"
    require(ok, "train.engine", c.cfg.train.engine, "the package deepspeed is not installed", fix)


def deepspeed_has_data_parallelism(c: Case) -> None:
    """Layers, stages and sequences are split by megatron-core's schedules and groups."""
    if c.cfg.train.engine == "deepspeed":
        for name in ("tensor", "pipeline", "context"):
            size, rule = getattr(c.cfg.parallel, name), "train.engine = deepspeed has data parallelism alone"
            require(size == 1, f"parallel.{name}", size, rule, "the nearest is 1, or use train.engine: megatron")


def deepspeed_lacks(c: Case) -> None:
    """What is built on megatron-core's optimizers, gradient buffers or captured passes."""
    if c.cfg.train.engine != "deepspeed":
        return
    cfg = c.cfg
    wanted: tuple[tuple[str, Any, Any, str], ...] = (
        ("precision.fp8", cfg.precision.fp8, "none", "use none"),
        ("precision.cuda_graphs", cfg.precision.cuda_graphs is True, False, "use auto"),
        ("precision.grad_accum_fusion", cfg.precision.grad_accum_fusion is True, False, "use auto"),
        ("model.moe", cfg.model.moe or None, None, "leave it out"),
        ("optimizer.kind", cfg.optimizer.kind, "adamw", "use adamw"),
        ("optimizer.ema_decay", cfg.optimizer.ema_decay, 0.0, "use 0; megaponder average averages checkpoints"),
        ("train.method_only_steps", cfg.train.method_only_steps, 0, "use 0"),
        ("train.only", cfg.train.only, [], "use []"),
        ("checkpoint.local", cfg.checkpoint.local, None, "leave it out"),
        ("parallel.offload_passes", cfg.parallel.offload_passes, 0, "use 0"),
        ("faults.in_process_restarts", cfg.faults.in_process_restarts, 0, "use 0"),
    )
    for field, value, legal, fix in wanted:
        rule = "train.engine = deepspeed does not have it"
        require(value == legal, field, value, rule, f"{fix}, or use train.engine: megatron")


def stages_fit(c: Case) -> None:
    """What a stage shards, and what may lie in main memory."""
    zero, par, name = c.cfg.zero, c.cfg.parallel, "parallel.zero_stage"
    if zero is None:
        return
    rule = "parallel.distributed_optimizer asks for a sharded optimizer"
    require(zero > 0 or not par.distributed_optimizer, name, zero, rule, "the nearest is 1")
    rule = "DeepSpeed keeps FP32 masters of BF16 weights in ZeRO's stages alone"
    require(zero > 0 or c.cfg.precision.dtype == "fp32", name, zero, rule, "the nearest is 1")
    least = {"none": 0, "optimizer": 1, "weights": 3}[par.offload]
    rule = f"parallel.offload = {par.offload} needs a stage of at least {least}"
    require(zero >= least, name, zero, rule, f"the nearest is {least}")


RULES: tuple[Rule, ...] = (
    fields_have_their_engine,
    deepspeed_is_installed,
    deepspeed_has_data_parallelism,
    deepspeed_lacks,
    stages_fit,
)
