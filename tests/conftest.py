"""What holds for all tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Leave PyTorch's, megatron-core's and transformers' objects out of every later garbage collection.

    There are a million of them, and a collection, which each export asks for several times, would look at them all.
    """
    gc.collect()
    gc.freeze()
