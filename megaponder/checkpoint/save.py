"""Writing checkpoints: all ranks write under a hidden name and read back each other's files; then one publishes.

Only the publication, and the deletions that follow it, wait for this reading.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.transformer.module import MegatronModule

from megaponder import files
from megaponder.checkpoint import folder, model_state, optimizer_state, rng, scales, writers, zero_state
from megaponder.checkpoint.ema import Ema
from megaponder.checkpoint.manifest import Files
from megaponder.checkpoint.state import CONFIG, Contents, TrainState, save_state
from megaponder.checkpoint.verify import Verification
from megaponder.checkpoint.writers import Results
from megaponder.config import yaml_file
from megaponder.config.load import to_mapping
from megaponder.config.schema import RunConfig
from megaponder.engine.zero import Updates, ZeroOptimizer
from megaponder.errors import UserError
from megaponder.ranks import gather, largest

T = TypeVar("T")
log = logging.getLogger(__name__)
Published = Callable[[Path, float], None]
"""Called on every rank for a complete checkpoint, with its folder and the seconds since its save started."""


def _failed(path: Path, reason: str) -> UserError:
    free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
    return UserError(
        f"The checkpoint could not be written to {path} ({reason.rstrip('.')}; {free / 1e9:.1f} GB are free there); "
        "earlier ones, if any, are intact."
    )


@dataclass
class _Pending:
    """A save in progress."""

    path: Path
    state: TrainState
    started: float
    results: Results
    verification: Verification | None = None
    """Started when all ranks have written."""


class Saver:
    """Saves checkpoints of one run.  All ranks call every method at the same step."""

    def __init__(
        self,
        root: Path,
        cfg: RunConfig,
        stage: MegatronModule,
        optimizer: Updates,
        data: dict[str, dict[str, str | int | None]],
        newest: int = 0,
        published: Published = lambda path, seconds: None,
        ema: Ema | None = None,
    ):
        self.ema = ema
        self.root, self.cfg, self.stage, self.optimizer = root, cfg, stage, optimizer
        self.options, self._data, self._published = cfg.checkpoint, data, published
        self._calls = AsyncCallsQueue(persistent=False)  # a persistent writer requires CUDA in its own process
        self._strategy = writers.strategy(stage)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:  # replicas share the writing instead of leaving it to the first one
            self._strategy = FullyParallelSaveStrategyWrapper(self._strategy, group, do_cache_distribution=True)
        self._pending: _Pending | None = None
        self.newest = newest
        """Step of the newest checkpoint that was started or found."""

    def save(self, state: TrainState) -> None:
        """Start (asynchronous) or complete the checkpoint of `state`; one that is pending is completed first."""
        self.wait()
        path = Path(self._on_first_rank(lambda: str(folder.create(self.root, state.step))))
        started = time.perf_counter()
        with self._in_a_sentence(path):
            request, results = writers.request(self._tensors(), path, self._strategy)
            self._pending = pending = _Pending(path, state, started, results)
            request.add_finalize_fn(lambda: self._verify(pending))
            self.newest = state.step
            if self.options.asynchronous:
                self._calls.schedule_async_request(request)
                results.process = self._calls.async_calls[-1].async_caller.process
            else:
                request.execute_sync()
        if not self.options.asynchronous:
            self.wait()

    def poll(self) -> None:
        """Publish a pending checkpoint if all ranks have written it and read it back; called once per step."""
        if self._calls.get_num_unfinalized_calls():
            with self._in_a_sentence(self.root):
                self._calls.maybe_finalize_async_calls(blocking=False)
        elif self._pending is not None:
            self._conclude()

    def wait(self) -> None:
        """Publish a pending checkpoint, waiting for its writers and readers."""
        if self._calls.get_num_unfinalized_calls():
            with self._in_a_sentence(self.root):
                self._calls.maybe_finalize_async_calls(blocking=True)
        if self._pending is not None and self._pending.verification is not None:
            self._pending.verification.wait()
            self._conclude()

    def _verify(self, pending: _Pending) -> None:
        written = gather(pending.results.part)
        pending.verification = Verification(pending.path, written, dist.get_rank())

    def _conclude(self) -> None:
        """Publish once all ranks have read their share; a collective of one number."""
        pending = self._pending
        assert pending is not None and pending.verification is not None
        check = pending.verification
        verdict = largest((1 if check.complaint else 0) if check.done else 2, self._device)
        if verdict == 2:
            return
        if verdict == 1:
            bad = next(s for s in gather(check.complaint) if s.value is not None)
            raise self._given_up(pending.path, f"{bad.who} finds that {bad.value}")
        target = folder.final(self.root, pending.state.step)
        self._on_first_rank(lambda: self._publish(pending.path, pending.state, check.known))
        self._pending = None
        self._published(target, time.perf_counter() - pending.started)

    def _tensors(self) -> dict[str, Any]:
        if isinstance(self.optimizer, ZeroOptimizer):
            return zero_state.tensors(self.optimizer)
        model = model_state.sharded_state(self.stage)
        masters = optimizer_state.has_masters(self.stage.parameters())
        optimizer = optimizer_state.sharded_state(
            self.optimizer, model, model_state.metadata(), loading=False, masters=masters
        )
        found = {"model": model, "optimizer": optimizer, "random": rng.sharded_state()}
        if self.ema is not None:
            found["ema"] = self.ema.sharded_state(model, model_state.metadata(), loading=False)
        fp8 = scales.sharded_state(self.stage.fp8)
        return found | ({"fp8": fp8} if fp8 else {})  # megatron-core would pickle an empty part

    def _publish(self, path: Path, state: TrainState, known: Files) -> None:
        files.write_bytes(path / CONFIG, self._config)
        masters = optimizer_state.has_masters(self.stage.parameters())
        save_state(path, state, Contents(masters, model_state.layout(), data=dict(self._data)))
        log.info("saved %s", folder.publish(path, self.root, state.step, known))
        folder.retain(self.root, state.step, self.options.keep_last, self.options.keep_every)

    @functools.cached_property
    def _config(self) -> bytes:
        """The file of the configuration, which takes longer to make than to write, and stays the same in a run."""
        return yaml_file.to_text(to_mapping(self.cfg)).encode()

    @property
    def _device(self) -> torch.device:
        return next(self.stage.parameters()).device

    def _on_first_rank(self, action: Callable[[], T]) -> T:
        """Run on one rank; all ranks fail together, with its reason."""
        box: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                box[0] = action()
            except OSError as error:
                box[1] = f"{error.strerror or error}: {error.filename or self.root}"
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise self._given_up(self._pending.path if self._pending else self.root, box[1])
        return box[0]

    def _given_up(self, path: Path, reason: str) -> UserError:
        """The sentence for a failed save, whose files are deleted, since it may have filled the disk."""
        self._pending = None
        error = _failed(self.root, reason)
        if path != self.root and dist.get_rank() == 0:
            folder.discard(path)
        return error

    @contextlib.contextmanager
    def _in_a_sentence(self, path: Path) -> Iterator[None]:
        """Turns a failed write (disk full, folder gone) into one sentence."""
        path = self._pending.path if self._pending is not None else path
        with writers.one_sentence(path, lambda why: self._given_up(path, why)):
            yield
