"""Steps, tokens and time of a run for a given MFU."""

from __future__ import annotations

from dataclasses import dataclass

from megaponder.config import budget
from megaponder.config.method_facts import MethodLike
from megaponder.config.schema import RunConfig
from megaponder.plan.flops import mean_needed, steps_seen


@dataclass(frozen=True)
class Estimate:
    """A run on `world_size` devices of `peak_tflops` each."""

    steps: int
    tokens: int
    flops: float
    """Needed, of the whole run."""
    tokens_per_second: float
    """Of one device."""
    seconds: float
    """Of the whole run, without evaluation, saving and restarts."""
    step_seconds: float
    """Of a step with the full batch."""
    bubble: float
    """Share of time that the pipeline idles at the full batch; MFU already includes it."""


def estimate(cfg: RunConfig, method: MethodLike, world_size: int, mfu: float, peak_tflops: float) -> Estimate:
    """Time of a resolved configuration's run; `mfu` counts needed FLOPs against the BF16 peak."""
    assert cfg.train.steps is not None
    tokens = budget.total_tokens(cfg)
    needed = mean_needed(cfg, method)
    rate = mfu * peak_tflops * 1e12 / needed
    full = cfg.train.global_batch * cfg.data.sequence_length
    return Estimate(
        steps=cfg.train.steps,
        tokens=tokens,
        flops=needed * tokens,
        tokens_per_second=rate,
        seconds=tokens / (rate * world_size),
        step_seconds=full / (rate * world_size),
        bubble=bubble_share(cfg, method, world_size),
    )


def bubble_share(cfg: RunConfig, method: MethodLike, world_size: int) -> float:
    """Idle share of a pipeline: (P - 1) / (K M + P - 1); K passes fill it as K model chunks would."""
    pp = cfg.parallel.pipeline
    dp = max(1, world_size // cfg.parallel.replica)
    m = max(1, cfg.train.global_batch // (cfg.train.micro_batch * dp))
    ks = [len(method.passes(cfg.train.seed, step)) for step in steps_seen(cfg, method)]
    return (pp - 1) / (sum(ks) / len(ks) * m + pp - 1)
