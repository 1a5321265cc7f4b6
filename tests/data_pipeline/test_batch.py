"""Loss masks by name."""

import numpy as np
import pytest

from megaponder.data.batch import loss_mask, make_micro_batch
from megaponder.errors import ConfigError

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
