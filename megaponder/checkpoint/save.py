"""Writing checkpoints: all ranks write their shards under a temporary name, one rank publishes when all are done."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule

from megaponder.checkpoint import folder, manifest, model_state, moments, results, rng, scales
from megaponder.checkpoint.state import CONFIG, Contents, TrainState, save_state
from megaponder.config.load import dump
from megaponder.config.schema import RunConfig
from megaponder.errors import UserError

log = logging.getLogger(__name__)
Published = Callable[[Path, float], None]
"""Told, on every rank, of a whole checkpoint: its folder, and the seconds since its save began."""


def _failed(path: Path, reason: str) -> UserError:
    free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
    if "results_queue" in reason or "inline_container" in reason:  # what writers whose bytes were not taken say
        reason = "its writers failed, as they do on a full disk and at a limit of file sizes"
    return UserError(
        f"The checkpoint could not be written to {path} ({reason}; {free / 1e9:.1f} GB are free there); earlier ones, "
        "if any, are whole."
    )


class Saver:
    """Saves checkpoints of one run.  All ranks call every method at the same step."""

    def __init__(
        self,
        root: Path,
        cfg: RunConfig,
        stage: MegatronModule,
        optimizer: MegatronOptimizer,
        data: dict[str, dict[str, str | int | None]],
        newest: int = 0,
        published: Published = lambda path, seconds: None,
    ):
        self.root, self.cfg, self.stage, self.optimizer = root, cfg, stage, optimizer
        self.options, self._data, self._published = cfg.checkpoint, data, published
        self._calls = AsyncCallsQueue(persistent=False)  # a persistent writer asks for CUDA in its own process
        self._strategy = get_default_save_sharded_strategy("torch_dist", 1)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:  # replicas share the writing instead of leaving it to the first of them
            self._strategy = FullyParallelSaveStrategyWrapper(self._strategy, group, do_cache_distribution=True)
        self.newest = newest
        """Step of the newest checkpoint that was started or found."""

    def save(self, state: TrainState) -> None:
        """Start (asynchronous) or complete the checkpoint of `state`; one that is pending is completed first."""
        self.wait()
        started = time.perf_counter()
        path = folder.temporary(self.root, state.step)
        self._on_first_rank(lambda: folder.begin(self.root, state.step))
        results.use(path / f".results-{dist.get_rank()}")
        request = dist_checkpointing.save(
            self._tensors(), str(path), self._strategy, async_sharded_save=True, content_metadata=None
        )
        assert request is not None
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(_write, request.async_fn, path, dist.get_rank()))
        request.add_finalize_fn(lambda: self._on_first_rank(lambda: self._publish(path, state)))
        target = folder.final(self.root, state.step)
        request.add_finalize_fn(lambda: self._published(target, time.perf_counter() - started))
        self.newest = state.step
        with _in_a_sentence(path):
            if self.options.asynchronous:
                self._calls.schedule_async_request(request)
            else:
                request.execute_sync()

    def poll(self) -> None:
        """Publish a pending checkpoint if all ranks have written it; called once a step."""
        if self._calls.get_num_unfinalized_calls():
            with _in_a_sentence(self.root):
                self._calls.maybe_finalize_async_calls(blocking=False)

    def wait(self) -> None:
        """Publish a pending checkpoint, waiting for its writers."""
        if self._calls.get_num_unfinalized_calls():
            with _in_a_sentence(self.root):
                self._calls.maybe_finalize_async_calls(blocking=True)

    def _tensors(self) -> dict[str, Any]:
        model = model_state.sharded_state(self.stage)
        masters = moments.has_masters(self.stage.parameters())
        optimizer = moments.sharded_state(self.optimizer, model, model_state.metadata(), loading=False, masters=masters)
        found = {"model": model, "optimizer": optimizer, "random": rng.sharded_state()}
        fp8 = scales.sharded_state(self.stage.fp8)
        return found | ({"fp8": fp8} if fp8 else {})  # megatron-core would pickle an empty part

    def _publish(self, path: Path, state: TrainState) -> None:
        dump(self.cfg, path / CONFIG)
        masters = moments.has_masters(self.stage.parameters())
        save_state(path, state, Contents(masters, model_state.layout(), data=dict(self._data)))
        log.info("saved %s", folder.publish(self.root, state.step))
        folder.retain(self.root, self.options.keep_last, self.options.keep_every)

    def _on_first_rank(self, action: Callable[[], object]) -> None:
        """Run on one rank; all ranks fail together, with its reason."""
        reason: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                action()
            except OSError as error:
                reason = [f"{error.strerror or error}: {error.filename}"]
        dist.broadcast_object_list(reason, src=0)
        if reason[0] is not None:
            raise _failed(self.root, reason[0])


def _write(write: Callable[..., None], path: Path, rank: int, *args: Any, **kwargs: Any) -> None:
    """megatron-core's writer, then checksums, in the process that wrote."""
    write(*args, **kwargs)
    with contextlib.suppress(OSError):  # the publisher checks files without a part itself, and says what is wrong
        manifest.write_part(path, rank, [p.name for p in path.glob(f"__{rank}_*.distcp")])


@contextlib.contextmanager
def _in_a_sentence(path: Path) -> Iterator[None]:
    """Turns a failed write (disk full, folder gone) into one sentence."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reasons = "; ".join(str(e) for e, _ in error.failures.values()) or "another rank says why"
        raise _failed(path, reasons) from error
