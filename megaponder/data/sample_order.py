"""The order of training sequences: GPTDataset and its blends, made a pure function of (seed, epoch, index).

megatron-core shuffles all requested epochs together, so that a longer budget, or a resume past an epoch's edge, changes
what earlier steps saw.  Here each epoch is shuffled by itself from (seed, epoch): a prefix of the order never depends
on how much was asked for.  Cutting documents into samples and drawing the blend stay megatron-core's.

Its rank-0-builds-then-barrier is replaced by `cache.cached_arrays`, which any number of processes may call at any time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megaponder.data import packing
from megaponder.data.cache import cached_arrays
from megaponder.data.indexed import Index, TokenReader
from megaponder.data.shuffled import generator, samples_in
from megaponder.errors import UserError

_FORMAT = 1  # of the cached arrays; increase it when they change


@dataclass
class OrderConfig(GPTDatasetConfig):
    """GPTDatasetConfig plus what the caches require."""

    wait_seconds: float = 600.0
    """Maximum wait for another process that builds an index."""
    indexes: dict[str, Index] = field(default_factory=dict)
    """The opened datasets.  Caches are named by `Index.fingerprint`, so an old one is never used for a rewritten
    dataset."""


@dataclass(frozen=True)
class Vocabulary:
    """The part of a tokenizer that megatron-core's datasets ask for."""

    vocab_size: int
    eod: int | None

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "eod": self.eod}


def cache_key(**parts: Any) -> str:
    """Name of the set of arrays determined by `parts`."""
    text = json.dumps({"format": _FORMAT, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def epochs_for(samples: int, tokens: int, sequence_length: int) -> int:
    """Epochs of `tokens` tokens that hold `samples` samples; at least one."""
    return max(1, -(-(samples * sequence_length + 1) // tokens))


def build_order(lengths: np.ndarray, ids: np.ndarray, length: int, epochs: int, seed: int) -> dict[str, np.ndarray]:
    """Document, sample and shuffle index of complete `epochs` over documents `ids` (int32) of `lengths` (int32).

    A sample that crosses an epoch's edge belongs to the later epoch; both shuffles stay inside their epoch.
    """
    documents = np.tile(ids.astype(np.int32), (epochs, 1))
    for epoch in range(epochs):
        generator(seed, epoch, 0).shuffle(documents[epoch])
    tokens = int(lengths[ids].sum(dtype=np.int64))
    samples = helpers.build_sample_idx(np.array(lengths), documents.reshape(-1), length, epochs, tokens, True, True)
    shuffle = np.arange(samples.shape[0] - 1, dtype=np.int64)
    for epoch in range(epochs):
        part = shuffle[samples_in(epoch, tokens, length) : samples_in(epoch + 1, tokens, length)]
        generator(seed, epoch, 1).shuffle(part)
    return {"document": documents.reshape(-1), "sample": samples, "shuffle": shuffle}


class EpochGPTDataset(GPTDataset):
    """GPTDataset whose order is independent of the number of samples asked for; items are {"text": int64 [n + 1]}.

    Of conversations, which are packed whole, they are what `packing.joined` tells.
    """

    config: OrderConfig

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> TokenReader:
        """The opened files, instead of megatron-core's memory maps of whatever is now at this path."""
        assert isinstance(config, OrderConfig)
        return TokenReader(config.indexes[dataset_path])

    def _build_document_sample_shuffle_indices(self) -> Any:
        config, lengths, ids = self.config, self.dataset.sequence_lengths, self.indices
        self._talks = self.dataset.index.mask is not None
        if self._talks:
            return self._packed(lengths, ids)
        tokens = int(lengths[ids].sum(dtype=np.int64))
        epochs = epochs_for(self.num_samples, tokens, config.sequence_length)
        key = cache_key(
            seed=config.random_seed,
            length=config.sequence_length,
            range=[int(ids[0]), int(ids[-1]) + 1],
            epochs=epochs,
            data=config.indexes[self.dataset_path].fingerprint(),
        )
        arrays = cached_arrays(
            config.path_to_cache,
            f"order-{key}",
            ("document", "sample", "shuffle"),
            lambda: self._order(lengths, ids, epochs),
            config.wait_seconds,
        )
        return arrays["document"], arrays["sample"], arrays["shuffle"]

    def _packed(self, lengths: np.ndarray, ids: np.ndarray) -> Any:
        config = self.config
        key = cache_key(
            packed=packing.OPEN,
            seed=config.random_seed,
            length=config.sequence_length,
            range=[int(ids[0]), int(ids[-1]) + 1],
            samples=self.num_samples,
            data=config.indexes[self.dataset_path].fingerprint(),
        )
        room, samples = config.sequence_length + 1, self.num_samples or 1
        arrays = cached_arrays(
            config.path_to_cache,
            f"packed-{key}",
            ("conversations", "begins"),
            lambda: packing.build_order(lengths, ids, room, config.random_seed, samples),
            config.wait_seconds,
        )
        return arrays["conversations"], arrays["begins"], None

    def _order(self, lengths: np.ndarray, ids: np.ndarray, epochs: int) -> dict[str, np.ndarray]:
        """`build_order`; UserError, before any work, for more epochs than this machine's memory can hold."""
        held = epochs * len(ids) * 4 + self.num_samples * 16  # documents; where samples begin and their order
        if held > psutil.virtual_memory().total:
            raise UserError(
                f"train.steps asks for {self.num_samples:,} sequences of {self.dataset_path}, {epochs:,} epochs, whose "
                f"order of {held / 2**30:,.0f} GiB does not fit in memory; train for fewer steps, or use more data."
            )
        return build_order(lengths, ids, self.config.sequence_length, epochs, self.config.random_seed)

    def __getitem__(self, idx: int) -> dict[str, np.ndarray]:
        if self._talks:
            begin, end = self.sample_index.part(int(idx), int(idx) + 2).tolist()
            numbers = np.asarray(self.document_index.part(begin, end))
            return packing.joined(
                self.dataset.index, numbers, self.config.sequence_length, self.config.tokenizer.eod or 0
            )
        place = int(self.shuffle_index[int(idx)])
        (first, begin), (last, end) = self.sample_index.part(place, place + 2).tolist()
        text = self.dataset.text(self.document_index.part(first, last + 1).tolist(), begin, end + 1)
        if len(text) != self.config.sequence_length + 1:
            raise UserError(
                f"{self.dataset_path}.idx: damaged (its lengths and offsets disagree in sample {place}); prepare or "
                "copy the dataset again."
            )
        return {"text": text}


class CachedBlend(BlendedDataset):
    """BlendedDataset with the shared cache; which source provides sequence i depends only on weights and i."""

    config: OrderConfig

    def _build_indices(self) -> Any:
        def build() -> dict[str, np.ndarray]:
            source, sample = np.zeros(self.size, np.int16), np.zeros(self.size, np.int64)
            helpers.build_blending_indices(source, sample, self.weights, len(self.datasets), self.size, False)
            return {"source": source, "sample": sample}

        key = cache_key(weights=[float(w).hex() for w in self.weights], size=self.size)
        arrays = cached_arrays(
            self.config.path_to_cache, f"blend-{key}", ("source", "sample"), build, self.config.wait_seconds
        )
        return arrays["source"], arrays["sample"]


class LocalBuilder(BlendedMegatronDatasetBuilder):
    """BlendedMegatronDatasetBuilder without collectives: each process builds or finds the caches independently."""

    def _build_megatron_datasets_parallel(self, prefixes: list[str], split: list, sizes_per_dataset: list) -> list:
        pairs = zip(prefixes, sizes_per_dataset, strict=True)
        rows = [self._build_megatron_dataset_splits(prefix, split, sizes) for prefix, sizes in pairs]
        return [list(column) for column in zip(*rows, strict=True)]

    def build_generic_dataset(self, cls: type, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any) -> Any:
        if cls is BlendedDataset:
            datasets, weights, _, config = args
            # The builder rounds each source's share up and sums, which with many small sources requests far more than
            # the sources were built for.  With the requested size, no source is drawn beyond its share + 1.
            return CachedBlend(datasets, weights, self.sizes[datasets[0].index_split.value], config)
        return cls(*args)
