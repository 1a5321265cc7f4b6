"""Loss masks by name."""

from pathlib import Path

import numpy as np
import pytest

from megaponder.data.batch import FEWEST_EDGES, document_edges, loss_mask, make_micro_batch
from megaponder.data.document_length import document_tokens
from megaponder.data.indexed import read_index
from megaponder.errors import ConfigError
from tests.data_pipeline.make import random_documents, write_documents

TEXT = np.array([[5, 6, 0, 7, 0], [0, 0, 1, 2, 3]])  # EOD is 0
IDS, LABELS = TEXT[:, :-1], TEXT[:, 1:]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", [[1, 1, 1, 1], [1, 1, 1, 1]]),
        ("ignore_eod_target", [[1, 0, 1, 0], [0, 1, 1, 1]]),  # no loss on predicting an end
        ("megatron_eod", [[1, 1, 0, 1], [0, 0, 1, 1]]),  # no loss across an end
    ],
)
def test_masks(name: str, expected: list[list[int]]) -> None:
    mask = loss_mask(name, IDS, LABELS, 0)
    assert mask.dtype == np.float32 and mask.tolist() == expected


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"data\.loss_mask = 'eod'"):
        loss_mask("eod", IDS, LABELS, 0)
    with pytest.raises(ConfigError, match=r"data\.eod_id"):
        loss_mask("megatron_eod", IDS, LABELS, None)


def test_micro_batch() -> None:
    batch = make_micro_batch(TEXT, "plain", None)
    assert batch.ids_bn.tolist() == IDS.tolist() and batch.labels_bn.tolist() == LABELS.tolist()
    assert str(batch.ids_bn.dtype) == "torch.int64" and str(batch.loss_mask_bn.dtype) == "torch.float32"
    assert batch.ids_bn.is_contiguous() and batch.labels_bn.is_contiguous()
    assert batch.starts_bn is None and batch.edges is None


def test_documents_begin_behind_an_end() -> None:
    batch = make_micro_batch(TEXT, "plain", 0, document_attention=True)
    assert batch.starts_bn is not None and batch.edges is not None
    assert batch.starts_bn.tolist() == [[0, 0, 0, 3], [0, 1, 2, 2]]
    assert (
        batch.edges.tolist() == [0, 3, 4, 5, 6, *[8] * (FEWEST_EDGES - 4)] and str(batch.edges.dtype) == "torch.int32"
    )
    with pytest.raises(ConfigError, match=r"data\.document_attention = True: .* set data\.eod_id, or use false"):
        make_micro_batch(TEXT, "plain", None, document_attention=True)


@pytest.mark.parametrize(("documents", "room"), [(1, 16), (16, 16), (17, 32), (33, 64)])
def test_few_numbers_of_documents_occur(documents: int, room: int) -> None:
    starts = np.minimum(np.arange(40), documents - 1)[None]
    edges = document_edges(starts)
    assert edges.tolist() == [*range(documents), *[40] * (room + 1 - documents)]


def test_the_mean_length_of_a_tokens_document(tmp_path: Path) -> None:
    """Lengths 3, 5, 4 in samples of 4 tokens: parts of 3 and 1, of 4, of 4."""
    index = read_index(write_documents(tmp_path / "a", random_documents([3, 5, 4], vocab=9)))
    assert document_tokens(index, 4) == pytest.approx((9 + 1 + 16 + 16) / 12)
    assert document_tokens(index, 100) == pytest.approx((9 + 25 + 16) / 12)
