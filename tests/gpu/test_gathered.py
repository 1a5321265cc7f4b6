"""Halted tokens gathered away and masked, on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.layouts.test_gathered import both, test_gathered_is_masked  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
