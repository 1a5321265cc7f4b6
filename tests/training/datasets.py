"""Tiny indexed datasets, written the way every Megatron-family tool does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

EOD = 0


def write(prefix: Path, tokens: int, seed: int, vocabulary: int = 90) -> str:
    """A dataset of exactly `tokens` random tokens in documents of 5 to 40, each ending with EOD; returns its prefix."""
    from megaponder.engine import cuda_on_cpu

    cuda_on_cpu.install()
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    dice = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    while tokens:
        length = min(tokens, int(dice.integers(5, 40)))
        document = np.append(dice.integers(1, vocabulary, length - 1), EOD)
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
        tokens -= length
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
