"""The layout matrix on GPUs: the same cases, layouts and tolerance as on the CPU.

Over NCCL; ranks of layouts with more of them than there are GPUs share these (`one_card.py`).
"""

from __future__ import annotations

import pytest
import torch

from tests.layouts.test_layouts import (  # noqa: F401
    results,
    test_every_gradient_is_alive,
    test_layout_changes_nothing,
    test_statistics_and_auxiliary_loss_are_alive,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
