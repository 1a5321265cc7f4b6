"""What holds for all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import forks

LONG = (
    "training/test_resume.py",
    "training/test_faults.py",
    "layouts/test_layouts.py",
    "training",
    "layouts",
    "benchmarks/test_study.py",
    "export/test_to_hf.py",
    "test_configs.py",
    "demo",
    "docs/test_site.py",
    "upcycle",
    "export",
    "benchmarks",
    "cli",
    "engine",
    "test_old_files.py",
    "checkpoint",
    "inference",
    "ponder",
)
"""Files and folders that several processes start with, so that none is left with a long one at the end."""


# What a machine does in the meantime is no fault of what is tested, and what one passes all pass: with
# MEGAPONDER_WHOLE_MATRIX=1 there are other examples each time.
settings.register_profile(
    "tests", deadline=None, derandomize="MEGAPONDER_WHOLE_MATRIX" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """The processes of pytest-xdist are forked from one that has imported everything; files need not reach the disk."""
    os.fsync = lambda handle: None
    gc.set_threshold(*forks.COLLECTED)
    if getattr(config.option, "tx", None) and not hasattr(config, "workerinput"):
        python = f"popen//python={forks.python()}"
        config.option.tx = [spec.replace("popen", python, 1) for spec in config.option.tx]
        _rewrite_assertions(config)


def _rewrite_assertions(config: pytest.Config) -> None:
    """Rewrite the test files' assertions once, while the others' imports go on: else each process does it, for seconds.

    These are functions of pytest's own: where a release has others, each process does it as before.
    """
    if sys.dont_write_bytecode:
        return
    with contextlib.suppress(ImportError, AttributeError, TypeError, ValueError):
        from _pytest.assertion import rewrite

        state = config.stash[rewrite.assertstate_key]
        for path in sorted(Path(__file__).parent.rglob("test_*.py")):
            folder = rewrite.get_cache_dir(path)
            compiled = folder / f"{path.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(path, compiled) is None and rewrite.try_makedirs(folder):
                found, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(state, code, found, compiled)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    path = item.path.relative_to(item.config.rootpath / "tests")
    return min((place for place, name in enumerate(LONG) if path.is_relative_to(name)), default=len(LONG))


def pytest_collection_finish() -> None:
    """Leave PyTorch's, megatron-core's and transformers' objects out of every later garbage collection.

    There are a million of them, and a collection, which each export asks for several times, would look at them all.
    """
    gc.collect()
    gc.freeze()
