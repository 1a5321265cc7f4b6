"""What the engine consumes: one micro-batch of token ids, labels and loss mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from megaponder.errors import ConfigError

LOSS_MASKS = ("plain", "ignore_eod_target", "megatron_eod", "answers")


@dataclass(frozen=True)
class MicroBatch:
    """b sequences of n tokens, or the same part of each; labels are the ids shifted by one."""

    ids_bn: Tensor
    """int64 [b, n]."""
    labels_bn: Tensor
    """int64 [b, n]: labels[:, i] is the token that follows ids[:, i]."""
    loss_mask_bn: Tensor
    """float32 [b, n]: 1 where the label counts in the loss, else 0."""
    starts_bn: Tensor | None = None
    """int64 [b, n]: the first token of each token's document, counted in its sequence; None: tokens attend to all
    before them, whatever document they belong to."""
    edges: Tensor | None = None
    """int32 [E + 1]: where the documents of all sequences, joined, begin, and the end; with `starts_bn`.  The end is
    repeated until E is a power of two, so that few shapes occur.  None for a part of each sequence."""
    places_n: Tensor | None = None
    """int64 [n]: where the tokens stand in their sequence, if they are a part of it; None: 0 .. n - 1."""
    weights_bn: Tensor | None = None
    """float32 [b, n]: the weight of each token's loss in training; None: `loss_mask_bn`, or what `engine.selection`
    finds where the loss is computed."""
    disciplines_b: Tensor | None = None
    """int64 [b]: the number of each sequence's discipline (`train.disciplines`), -1: it has none; None: nobody asks."""


def tensors_of(batch: MicroBatch) -> tuple[Tensor | None, ...]:
    """Its fields, in their order."""
    rest = batch.places_n, batch.weights_bn, batch.disciplines_b
    return batch.ids_bn, batch.labels_bn, batch.loss_mask_bn, batch.starts_bn, batch.edges, *rest


FEWEST_EDGES = 16
"""Documents of a micro-batch for which `MicroBatch.edges` has room at least."""


def loss_mask(name: str, ids: np.ndarray, labels: np.ndarray, eod_id: int | None) -> np.ndarray:
    """float32 mask of the shape of `labels`.

    plain: every target counts.  ignore_eod_target: all except targets that are EOD (the papers' rule).
    megatron_eod: all except targets whose input is EOD, that is, the first token of each document (Megatron's rule).
    answers: of a text, as ignore_eod_target; conversations say themselves which of their targets count.
    """
    if name == "plain":
        return np.ones(labels.shape, np.float32)
    if name not in LOSS_MASKS:
        raise ConfigError("data.loss_mask", name, f"must be one of {', '.join(LOSS_MASKS)}", "try ignore_eod_target")
    if eod_id is None:
        raise ConfigError("data.eod_id", None, f"loss_mask {name} requires the end-of-document id", "set data.eod_id")
    return ((ids if name == "megatron_eod" else labels) != eod_id).astype(np.float32)


def document_starts(ids: np.ndarray, eod_id: int) -> np.ndarray:
    """The first token of each token's document, counted in its sequence: int64 of the shape of `ids` [b, n].

    A document ends with its EOD; what stands first in a sequence begins one, though it may be the middle of a text.
    """
    places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    begins = np.zeros(ids.shape, bool)
    begins[:, 1:] = ids[:, :-1] == eod_id
    return np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def document_edges(starts: np.ndarray) -> np.ndarray:
    """`MicroBatch.edges` of `MicroBatch.starts_bn`."""
    first = np.flatnonzero(starts == np.arange(starts.shape[1]))
    room = max(FEWEST_EDGES, 1 << (len(first) - 1).bit_length())
    return np.pad(first, (0, room + 1 - len(first)), constant_values=starts.size).astype(np.int32)


def make_micro_batch(
    text: np.ndarray,
    mask: str,
    eod_id: int | None,
    document_attention: bool = False,
    conversations: Mapping[int, Mapping[str, np.ndarray]] = MappingProxyType({}),
) -> MicroBatch:
    """Micro-batch of `text`, int64 [b, n + 1].

    `conversations`: of rows that hold conversations, the targets that count and where each token's begins
    (`packing.joined`); one of them attends to itself alone.
    """
    ids, labels = text[:, :-1], text[:, 1:]
    texts = len(conversations) < len(text)
    counted = loss_mask(mask if texts else "plain", ids, labels, eod_id)
    for row, item in conversations.items():
        counted[row] = item["targets"]
    parts = [np.ascontiguousarray(ids), np.ascontiguousarray(labels), counted]
    if document_attention or conversations:
        starts = np.zeros(ids.shape, np.int64)
        if document_attention and texts:
            if eod_id is None:
                rule = "documents are told apart by the end-of-document id, which is not known"
                raise ConfigError("data.document_attention", True, rule, "set data.eod_id, or use false")
            starts = document_starts(ids, eod_id)
        for row, item in conversations.items():
            starts[row] = item["starts"]
        parts += [starts, document_edges(starts)]
    return MicroBatch(*map(torch.from_numpy, parts))


def batch_of(
    items: Sequence[Mapping[str, np.ndarray]], mask: str, eod_id: int | None, document_attention: bool
) -> MicroBatch:
    """Micro-batch of the items of datasets: each has a "text", int64 [n + 1]; see `make_micro_batch`."""
    own = {row: item for row, item in enumerate(items) if "targets" in item}
    return make_micro_batch(np.stack([item["text"] for item in items]), mask, eod_id, document_attention, own)
