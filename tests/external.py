"""Tests that start whole programs of others (Slurm, Prometheus, Chromium) take minutes: they run when asked for."""

from __future__ import annotations

import os

import pytest

EXTERNAL = pytest.mark.skipif(
    "MEGAPONDER_EXTERNAL_TESTS" not in os.environ, reason="MEGAPONDER_EXTERNAL_TESTS is not set"
)
