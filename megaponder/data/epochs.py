"""Epochs: the steps of train.epochs, and how often a run reads each of its datasets; no torch."""

from __future__ import annotations

import math

import numpy as np

from megaponder.config.budget import sequences_after, steps_for_sequences
from megaponder.config.schema import RunConfig
from megaponder.data.blend import parse_blend
from megaponder.data.packing import sequences_in
from megaponder.data.shuffled import samples_in
from megaponder.data.sources import Opened, SourceFacts
from megaponder.errors import ConfigError


def _packed(cfg: RunConfig, source: SourceFacts) -> bool:
    """Its conversations are packed into sequences, and their answers alone are learnt."""
    return source.conversations and cfg.data.loss_mask == "answers"


def _sequences(cfg: RunConfig, source: SourceFacts, opened: dict[str, Opened], epochs: int) -> int:
    """Of so many epochs of a source."""
    length, seed = cfg.data.sequence_length, cfg.data.shuffle_seed
    if not _packed(cfg, source):
        return samples_in(epochs, source.tokens, length)
    numbers = np.arange(source.documents, dtype=np.int32)  # a split's training part comes first
    lengths = opened[source.path].index.lengths[: source.documents]
    return sequences_in(lengths, numbers, length + 1, cfg.train.seed if seed is None else seed, epochs)


def steps_of_epochs(cfg: RunConfig, train: list[SourceFacts], opened: dict[str, Opened]) -> int | None:
    """Steps of train.epochs; None if that is not set.

    Without weights they are the sequences of so many epochs of every source.  With weights each source is read in
    epochs of its own number, and those of the conversations count.  ConfigError if there are none, or if train.steps
    disagrees.
    """
    given = cfg.train
    if given.epochs is None or given.global_batch < 1 or cfg.data.sequence_length < 1:  # the rules report the others
        return None
    weighted = len(train) > 1 and any(s.weight is not None for s in parse_blend(cfg.data.train, "data.train"))
    counted = [source for source in train if _packed(cfg, source)] if weighted else train
    if not counted:
        rule = "by the weights of data.train each dataset is read in epochs of its own number"
        fix = "set train.steps or train.tokens, or leave the weights out"
        raise ConfigError("train.epochs", given.epochs, rule, fix)
    sequences = sum(_sequences(cfg, source, opened, given.epochs) for source in counted)
    if weighted:
        sequences = math.ceil(round(sequences / sum(source.weight for source in counted), 6))
    steps = max(1, steps_for_sequences(given, sequences))
    if given.steps not in (None, steps):
        rule = f"train.epochs = {given.epochs} is {steps} steps, and only one of the two may set the budget"
        raise ConfigError("train.steps", given.steps, rule, "set the other one to null")
    return steps


def summary(cfg: RunConfig, train: list[SourceFacts], opened: dict[str, Opened]) -> list[str]:
    """Sentences about what a run of `cfg.train.steps` learns of each source of conversations, and how often it reads
    all sources; none for a run on texts alone without train.epochs."""
    talks = [source.path for source in train if source.conversations]
    said = [
        f"warning: {path} holds conversations, and data.loss_mask: plain learns its prompts too; only "
        "data.loss_mask: answers learns the answers alone."
        for path in talks
        if cfg.data.loss_mask == "plain"
    ]
    if cfg.train.steps is None or not (talks or cfg.train.epochs):
        return said
    total = sequences_after(cfg.train, cfg.train.steps)
    reads = []
    for source in train:
        times = total * source.weight / max(1, _sequences(cfg, source, opened, 1))
        reads.append(f"{source.path} {times:,.2f} times" if times >= 0.1 else f"{source.path} {times:.1g} times")
    return [*said, f"In {cfg.train.steps:,} steps data.train is read so often: {', '.join(reads)}."]
