"""Bytes of weights, gradients and optimizer state on a GPU with DeepSpeed, by ZeRO's stage.

    stage    weights         gradients                    optimizer
    0        all             all                          moments of all
    1        all             all, and in BF16 FP32 sums   a share, with FP32 masters
    2        all             a share in FP32, a bucket    a share
    3        a share, and    a share in FP32, a bucket    a share
             what is gathered

What lies in main memory (`parallel.offload`) takes nothing on the GPU; `main_memory` counts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megaponder.config.schema import Offload, RunConfig
from megaponder.config.zero import BUCKET, LIVE
from megaponder.plan.parameters import Parameters

CHOICES: tuple[tuple[int, Offload], ...] = (
    (0, "none"), (1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"),
    (3, "weights"),
)  # fmt: skip
"""Stages and offloads."""


def with_choice(cfg: RunConfig, stage: int, offload: Offload) -> RunConfig:
    """The run with another stage and offload."""
    return replace(cfg, parallel=replace(cfg.parallel, zero_stage=stage, offload=offload))


def choices(cfg: RunConfig) -> Iterator[tuple[int, Offload]]:
    """The legal ones."""
    for stage, offload in CHOICES:
        if stage > 0 or not (cfg.parallel.distributed_optimizer or cfg.precision.dtype == "bf16"):
            yield stage, offload


def states(cfg: RunConfig, held: Parameters, element: int, dp: int) -> tuple[int, int, int]:
    """Weights, gradients and optimizer state; `element`: bytes of a parameter, `dp`: ranks that share."""
    stage, offload, total = cfg.zero or 0, cfg.parallel.offload, held.total
    share, bucket = -(-total // dp), min(BUCKET, total)
    optimizer = 8 * total if stage == 0 else 12 * share
    if stage <= 1:
        gradients = total * element + (4 * total if stage == 1 and element == 2 else 0)
    else:
        gradients = 4 * share + 2 * bucket * element
    weights = total * element
    if stage == 3:
        tables = held.embedding + held.positions + held.head  # read in every pass, and whole while a step runs
        whole = min(total, tables + LIVE)
        weights = (share + whole) * element
        if offload == "weights":
            weights = whole * element
    if offload != "none":
        optimizer = 0
        if stage == 3 or (stage == 2 and element == 4):  # in BF16 stage 2 adds micro-batches up on the GPU
            gradients -= 4 * share
    return weights, gradients, optimizer


def main_memory(cfg: RunConfig, held: Parameters, element: int, dp: int) -> int:
    """Bytes of main memory for a rank: moments, FP32 weights and gradients, and its shard of the weights."""
    share = -(-held.total // dp)
    return {"none": 0, "optimizer": 16 * share, "weights": (16 + element) * share}[cfg.parallel.offload]
