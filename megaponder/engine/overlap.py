"""Overlapped gradient reduction where the passes change from step to step.

megatron-core counts in its first step how often each gradient of a bucket arrives, and in later steps starts the
bucket's reduction at that count.  With one stage a gradient arrives once a backward, whatever the passes.  In a
pipeline it arrives once a pass, so the counts belong to a plan: the first step with a new plan reduces at its end and
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from megaponder.ponder.base import Pass


class Arrivals:
    """The counts of each plan."""

    def __init__(self, ddp: DistributedDataParallel):
        self._buckets: list[Any] = ddp.bucket_groups + ddp.expert_parallel_bucket_groups
        self._plan: tuple[Pass, ...] | None = None
        self._known: dict[tuple[Pass, ...], list[dict[Any, int]]] = {}

    def expect(self, passes: Sequence[Pass]) -> None:
        """A step with this plan follows; gradients were cleared, which stores the counts of the last first step."""
        plan, before = tuple(passes), self._plan
        if plan == before:
            return
        if before is not None and not any(b.is_first_batch for b in self._buckets):
            self._known[before] = [b.golden_per_param_grad_ready_counts for b in self._buckets]
        self._plan, counts = plan, self._known.get(plan)
        for i, bucket in enumerate(self._buckets):
            bucket.is_first_batch = counts is None
            bucket.golden_per_param_grad_ready_counts = {} if counts is None else counts[i]
