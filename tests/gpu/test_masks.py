"""Halting masks on GPUs: equal bit for bit on all ranks, in BF16 too."""

from __future__ import annotations

import pytest
import torch

from tests.layouts.test_masks import (  # noqa: F401
    seen,
    test_all_ranks_have_the_same_bits,
    test_every_layout_halts_the_same_tokens,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
