"""Packed conversations compute what each computes alone, and what nobody is to learn has no gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megaponder.data.batch import MicroBatch, batch_of
from megaponder.data.indexed import Index, read_index
from megaponder.data.packing import in_stored_order, read
from tests.data_pipeline.make import write_conversations
from tests.layouts.cases import CASES, LENGTH, VOCAB, WHOLE
from tests.layouts.test_documents import compare, each

NAMES = ("vanilla-llama-tied", "ponderlm-topk-gpt2-tied", "ponderlm2-llama-gqa", "adaponderlm-llama-gqa")


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """Conversations of up to 9 tokens, and one that is cut."""
    return read_index(write_conversations(tmp_path / "talks", 7, LENGTH + 4, seed=5, vocab=VOCAB))


def packed(index: Index) -> MicroBatch:
    """All of them, each behind or before others."""
    return batch_of(list(in_stored_order(index, LENGTH, 0)), "answers", None, True)


def alone(index: Index) -> list[MicroBatch]:
    """Each as a sequence of its own."""
    parts = []
    for number in range(index.sequences):
        ids, mask = (torch.from_numpy(x)[None] for x in read(index, number, LENGTH + 1))
        parts.append(MicroBatch(ids[:, :-1], ids[:, 1:], mask[:, 1:]))
    return parts


@pytest.mark.parametrize("name", CASES if WHOLE else NAMES)
def test_packed_is_alone(name: str, index: Index) -> None:
    batch = packed(index)
    assert len(batch.ids_bn) < index.sequences and (np.asarray(index.lengths) > LENGTH + 1).any()
    assert batch.loss_mask_bn.sum() > index.sequences
    compare(*each(name, [batch], alone(index)))


@pytest.mark.parametrize("name", NAMES)
def test_prompts_have_no_gradient(name: str, index: Index) -> None:
    """Other targets where none counts change nothing, to the last bit."""
    batch = packed(index)
    other = torch.where(batch.loss_mask_bn > 0, batch.labels_bn, (batch.labels_bn + 7) % VOCAB)
    first, second = each(name, [batch], [replace(batch, labels_bn=other)])
    assert first["numbers"] == second["numbers"] and first["stats"] == second["stats"]
    assert all(torch.equal(grad, second["grads"][key]) for key, grad in first["grads"].items())
    assert any(grad.abs().max() > 0 for grad in first["grads"].values())


def test_a_batch_without_targets(index: Index) -> None:
    """Its loss is not a number, and its gradient is zero: nothing is divided by zero."""
    batch = packed(index)
    [found] = each(NAMES[0], [replace(batch, loss_mask_bn=torch.zeros_like(batch.loss_mask_bn))])
    assert np.isnan(found["numbers"]["loss"])
    assert all((grad == 0).all() for grad in found["grads"].values())
