"""What holds for all tests."""

from __future__ import annotations

import gc

import pytest

LONG = (
    "training",
    "layouts",
    "export",
    "benchmarks",
    "demo",
    "cli",
    "test_configs.py",
    "test_old_files.py",
    "checkpoint",
    "inference",
    "ponder",
)
"""Folders and files that several processes start with, so that none is left with a long one at the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        order = {name: place for place, name in enumerate(LONG)}
        root = config.rootpath / "tests"
        items.sort(key=lambda item: order.get(item.path.relative_to(root).parts[0], len(LONG)))


def pytest_collection_finish() -> None:
    """Leave PyTorch's, megatron-core's and transformers' objects out of every later garbage collection.

    There are a million of them, and a collection, which each export asks for several times, would look at them all.
    """
    gc.collect()
    gc.freeze()
