"""Training sequences by number: the same global order in every layout, read by each rank independently."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from megaponder.config import disciplines
from megaponder.config.disciplines import Disciplines
from megaponder.config.schema import RunConfig
from megaponder.data.batch import MicroBatch, batch_of
from megaponder.data.check import DataFacts, check_data, open_data
from megaponder.data.sources import Opened, SourceFacts
from megaponder.errors import ConfigError, UserError


class TextDataset(Sized, Protocol):
    """Items are {"text": int64 [n + 1]}, of conversations also what `packing.joined` tells."""

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class SampleStream:
    """Sequences 0 ... len-1 of a blend.  The tokens of sequence i depend only on seed, blend and i."""

    def __init__(
        self,
        dataset: TextDataset,
        sequences: int,
        loss_mask: str,
        document_attention: bool,
        eod_id: int | None,
        vocab_size: int,
        field: str,
        disciplines: Disciplines | None = None,
    ):
        self.disciplines = disciplines
        self.dataset, self.sequences, self.field = dataset, sequences, field
        self.loss_mask, self.eod_id, self.vocab_size = loss_mask, eod_id, vocab_size
        self.document_attention = document_attention
        # A thread prefetches the next call's batches, so that slow storage is hidden behind compute.
        self._ahead: tuple[tuple[int, ...], Future[list[MicroBatch]]] | None = None

    def __len__(self) -> int:
        """Number of sequences requested when the stream was built."""
        return self.sequences

    def sequence(self, index: int) -> np.ndarray:
        """Tokens of sequence `index`, int64 [n + 1]; see `item`."""
        found: np.ndarray = self.item(index)["text"]
        return found

    def item(self, index: int) -> dict[str, np.ndarray]:
        """What the dataset has as sequence `index`.  UserError for an id for which the model has no embedding."""
        item = self.dataset[index]
        largest = int(item["text"].max())
        if largest >= self.vocab_size:
            raise UserError(
                f"model.vocab_size = {self.vocab_size}: sequence {index} of {self.field} contains token id {largest}; "
                f"use {largest + 1} or more, or the tokenizer's own size; if the tokenizer has no such id, bytes of "
                "the dataset were changed (megaponder inspect DATA --audit)."
            )
        return item

    def source(self, first: int, end: int) -> str:
        """The datasets that sequences first ... end - 1 come from, in words."""
        inside = getattr(self.dataset, "datasets", None)
        if inside is None:
            return str(self.dataset.dataset_path)  # type: ignore[attr-defined]
        numbers = sorted({int(self.dataset.dataset_index[i]) for i in range(first, end)})  # type: ignore[attr-defined]
        paths = [str(inside[number].dataset_path) for number in numbers]
        return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")

    def discipline(self, index: int) -> int:
        """The number of the discipline of sequence `index`; -1: it has none."""
        assert self.disciplines is not None
        inside, source = getattr(self.dataset, "datasets", None), self.dataset
        if inside is not None:
            source = inside[int(self.dataset.dataset_index[index])]  # type: ignore[attr-defined]
        return self.disciplines.of(str(source.dataset_path))  # type: ignore[attr-defined]

    def _batch(self, numbers: Sequence[int]) -> MicroBatch:
        items = [self.item(i) for i in numbers]
        made = batch_of(items, self.loss_mask, self.eod_id, self.document_attention)
        if self.disciplines is None:
            return made
        return replace(made, disciplines_b=torch.tensor([self.discipline(i) for i in numbers]))

    def _read(self, first: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int) -> list[MicroBatch]:
        return [
            self._batch(range(first + j * micro_batch, first + (j + 1) * micro_batch))
            for j in range(dp_rank, global_batch // micro_batch, dp_size)
        ]

    def micro_batches(
        self, first_sequence: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int
    ) -> list[MicroBatch]:
        """The result of `fetch`, once available."""
        return self.fetch(first_sequence, global_batch, micro_batch, dp_rank, dp_size).result()

    def fetch(
        self, first_sequence: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int
    ) -> Future[list[MicroBatch]]:
        """This rank's micro-batches of sequences first_sequence ... first_sequence + global_batch - 1, being read.

        Micro-batch j holds `micro_batch` consecutive sequences and belongs to data-parallel rank j % dp_size.
        Raises ConfigError if the batch does not divide evenly, ValueError for sequences outside the stream.
        """
        if global_batch % (micro_batch * dp_size):
            unit = micro_batch * dp_size
            raise ConfigError(
                "train.global_batch",
                global_batch,
                f"must be a multiple of micro_batch x data-parallel size = {unit}",
                f"use {max(1, round(global_batch / unit)) * unit}",
            )
        if first_sequence < 0 or first_sequence + global_batch > self.sequences:
            raise ValueError(
                f"{self.field} has sequences 0 to {self.sequences - 1}, not {first_sequence} to "
                f"{first_sequence + global_batch - 1}"
            )
        request = (first_sequence, global_batch, micro_batch, dp_rank, dp_size)
        ahead, self._ahead = self._ahead, None
        batches = ahead[1] if ahead is not None and ahead[0] == request else _start(None, self._read, *request)
        following = (first_sequence + global_batch, *request[1:])
        if following[0] + global_batch <= self.sequences:
            self._ahead = (following, _start(batches, self._read, *following))
        return batches


def _start(
    before: Future[list[MicroBatch]] | None, read: Callable[..., list[MicroBatch]], *request: int
) -> Future[list[MicroBatch]]:
    """Read once `before` is done, in a thread that does not keep the process alive if storage hangs."""
    future: Future[list[MicroBatch]] = Future()

    def work() -> None:
        if before is not None:
            wait([before])
        try:
            future.set_result(read(*request))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="read", daemon=True).start()
    return future


@dataclass(frozen=True)
class Streams:
    """The data of a run."""

    train: SampleStream
    valid: dict[str, SampleStream]
    """By the names of `data.valid`, "" where it has none; empty if no validation sequences were requested."""


def _blend(sources: list[SourceFacts]) -> tuple[list[str], list[float] | None]:
    """The form that megatron-core expects; a single source needs no weight."""
    return [s.path for s in sources], [s.weight for s in sources] if len(sources) > 1 else None


def _datasets(
    cfg: RunConfig, facts: DataFacts, opened: dict[str, Opened], train: int, valid: int
) -> tuple[TextDataset, dict[str, TextDataset]]:
    from megaponder.data import (
        sample_order,
    )  # imported here, since megatron-core must be imported after engine.cuda_on_cpu.install()

    seed = cfg.train.seed if cfg.data.shuffle_seed is None else cfg.data.shuffle_seed
    shared: dict[str, Any] = {
        "random_seed": seed,
        "sequence_length": cfg.data.sequence_length,
        "path_to_cache": cfg.data.cache or os.path.join(cfg.run, "cache"),
        "tokenizer": sample_order.Vocabulary(facts.vocab_size, facts.eod_id),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "wait_seconds": 60.0 * cfg.parallel.timeout_minutes,
        "indexes": {
            path: replace(one.index, mask=None) if cfg.data.loss_mask == "plain" else one.index  # all of it is learnt
            for path, one in opened.items()
        },
    }

    def built(config: Any, train: int, valid: int) -> list[Any]:
        sizes = [train, valid, 0]
        made: list[Any] = sample_order.LocalBuilder(sample_order.EpochGPTDataset, sizes, lambda: True, config).build()
        return made

    if not cfg.data.valid:
        config = sample_order.OrderConfig(blend=_blend(facts.train), split=cfg.data.split, **shared)
        config.split_matrix = [config.split_matrix[0], config.split_matrix[1] if valid else None, None]
        both = built(config, train, valid)
        return both[0], {"": both[1]} if valid else {}
    blends = [_blend(facts.train), None, None]
    training = built(sample_order.OrderConfig(blend_per_split=blends, **shared), train, 0)[0]
    sets = {}
    for name, sources in facts.valid.items() if valid else ():
        blends = [None, _blend(sources), None]
        sets[name] = built(sample_order.OrderConfig(blend_per_split=blends, **shared), 0, valid)[1]
    return training, sets


def build_streams(
    cfg: RunConfig, train_sequences: int, valid_sequences: int, opened: dict[str, Opened] | None = None
) -> Streams:
    """Streams of `train_sequences` and, for each validation blend, `valid_sequences` sequences.

    Datasets are repeated in full epochs as needed.

    `opened`: the result of `open_data`, if the datasets were opened before.
    Every rank calls this; no rank waits for another except through the index cache's file lock.
    Raises what `check_data` raises, and UserError if the cache folder cannot be used.
    """
    opened = open_data(cfg.data) if opened is None else opened
    facts = check_data(cfg, opened)
    train, valid = _datasets(cfg, facts, opened, train_sequences, valid_sequences)
    rest = (cfg.data.loss_mask, cfg.data.document_attention, facts.eod_id, facts.vocab_size)
    return Streams(
        SampleStream(train, train_sequences, *rest, "data.train", disciplines.read(cfg.train.disciplines)),
        {name: SampleStream(one, valid_sequences, *rest, cfg.data.valid_field(name)) for name, one in valid.items()},
    )
