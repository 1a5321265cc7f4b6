"""The run's data in order: the next batch from a position, without the sequences that rollbacks have skipped."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from megaponder.checkpoint.state import TrainState
from megaponder.config.budget import batch_at, sequences_after
from megaponder.config.schema import RunConfig
from megaponder.data.batch import MicroBatch
from megaponder.data.sources import Opened
from megaponder.data.stream import build_streams
from megaponder.engine.groups import Groups
from megaponder.training.fault_record import FaultRecord, past


class Batches:
    """Training batches by position, and the held-out streams by name.

    Equal on all ranks except for the rank's own share.
    """

    def __init__(
        self,
        cfg: RunConfig,
        total: int,
        state: TrainState,
        record: FaultRecord,
        groups: Groups,
        opened: dict[str, Opened],
    ):
        self._cfg, self._total, self._record, self._groups, self._opened = cfg, total, record, groups, opened
        self.restart(state)

    def restart(self, state: TrainState) -> None:
        """Open the data for the steps after `state`; called again after a rollback, which may skip sequences."""
        cfg, total = self._cfg, self._total
        self._left_out = self._record.left_out()
        needed = sequences_after(cfg.train, max(0, total - state.step), state.sequences)
        # a batch that would overlap a window starts after it
        needed += sum(
            end - first + cfg.train.global_batch - 1 for first, end in self._left_out if end > state.sequences
        )
        streams = build_streams(cfg, needed, cfg.train.eval_batches * cfg.train.global_batch, self._opened)
        self._train = streams.train
        self.valid = streams.valid

    def size(self, state: TrainState) -> int:
        """Sequences in the global batch of the next step."""
        return batch_at(self._cfg.train, state.sequences)

    def skip_left_out(self, state: TrainState) -> TrainState:
        """The position at which the next batch starts."""
        return replace(state, sequences=past(self._left_out, state.sequences, self.size(state)))

    def source(self, first: int, end: int) -> str:
        """The datasets that training sequences first ... end - 1 come from, in words."""
        return self._train.source(first, end)

    def fetch(self, state: TrainState) -> Future[list[MicroBatch]]:
        """This rank's micro-batches of the next step, being read."""
        g = self._groups
        return self._train.fetch(state.sequences, self.size(state), self._cfg.train.micro_batch, g.dp_rank, g.dp_size)
