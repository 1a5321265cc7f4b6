"""What the engine consumes: one micro-batch of token ids, labels and loss mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megaponder.errors import ConfigError

LOSS_MASKS = ("plain", "ignore_eod_target", "megatron_eod")


@dataclass(frozen=True)
class MicroBatch:
    """b sequences of n tokens; labels are the ids shifted by one."""

    ids_bn: Tensor
    """int64 [b, n]."""
    labels_bn: Tensor
    """int64 [b, n]: labels[:, i] is the token that follows ids[:, i]."""
    loss_mask_bn: Tensor
    """float32 [b, n]: 1 where the label counts in the loss, else 0."""


def loss_mask(name: str, ids: np.ndarray, labels: np.ndarray, eod_id: int | None) -> np.ndarray:
    """float32 mask of the shape of `labels`.

    plain: every target counts.  ignore_eod_target: all except targets that are EOD (the papers' rule).
    megatron_eod: all except targets whose input is EOD, that is, the first token of each document (Megatron's rule).
    """
    if name == "plain":
        return np.ones(labels.shape, np.float32)
    if name not in LOSS_MASKS:
        raise ConfigError("data.loss_mask", name, f"must be one of {', '.join(LOSS_MASKS)}", "try ignore_eod_target")
    if eod_id is None:
        raise ConfigError("data.eod_id", None, f"loss_mask {name} requires the end-of-document id", "set data.eod_id")
    return ((labels if name == "ignore_eod_target" else ids) != eod_id).astype(np.float32)


def make_micro_batch(text: np.ndarray, mask: str, eod_id: int | None) -> MicroBatch:
    """Micro-batch of `text`, int64 [b, n + 1]."""
    ids, labels = text[:, :-1], text[:, 1:]
    return MicroBatch(
        torch.from_numpy(np.ascontiguousarray(ids)),
        torch.from_numpy(np.ascontiguousarray(labels)),
        torch.from_numpy(loss_mask(mask, ids, labels, eod_id)),
    )
