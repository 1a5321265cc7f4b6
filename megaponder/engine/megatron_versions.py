"""What differs between megatron-core 0.16 and 0.19, in this one place; nothing else asks which of them is installed.

A difference is recognised by the thing itself, a module or an argument, and not by a version's number.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

_NEED_TRITON = "megatron.core.transformer.moe.ops.paged_stash"


def without_triton() -> None:
    """Let 0.19's schedules be imported where triton is not installed, as with PyTorch's builds for CPUs.

    They import kernels for mixtures of experts, which are for GPUs.  Call it before they are imported.
    """
    if importlib.util.find_spec("triton") is None and _NEED_TRITON not in sys.modules:
        empty = ModuleType(_NEED_TRITON)
        for name in ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel"):
            setattr(empty, name, None)
        sys.modules[_NEED_TRITON] = empty


def save_strategy(writers: int) -> Any:
    """The strategy that saves in PyTorch's distributed format, so many files a rank, several of them written by a
    process each; the files have one form whatever the version.

    0.19 stores what is no tensor (nothing of ours) as a pickled object among the tensors.  Here it goes into
    `common.pt`, as in 0.16: that version reads no other place, and indexes with objects are refused.
    """
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    strategy = get_default_save_sharded_strategy()
    strategy.thread_count = writers
    save = strategy.async_save
    if "async_strategy" not in inspect.signature(save).parameters:
        return strategy

    def async_save(state: dict[str, Any], folder: Path, async_strategy: str) -> Any:
        common = state.pop("common_state")
        if dist.get_rank() == 0:
            torch.save(common.data, Path(folder) / "common.pt")
        return save(state, folder, async_strategy)

    strategy.async_save = async_save
    return strategy


def request_to_save(tensors: dict[str, Any], path: Path, strategy: Any) -> Any:
    """megatron-core's request to save `tensors` into the folder `path`, by its own writer.

    0.19 prefers that of NVIDIA's resiliency extension.
    """
    from megatron.core import dist_checkpointing

    options: dict[str, Any] = {"async_sharded_save": True, "content_metadata": None}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"
    return dist_checkpointing.save(tensors, str(path), strategy, **options)


_ADVICE = {
    "dist_checkpointing.strategies.common": "load_common is deprecated",
    "dist_checkpointing.strategies.torch": "async save is deprecated",
    "distributed.distributed_data_parallel": "full_param_layout not provided",
    "transformer.transformer_layer": "Rewrapping ModuleSpec",
}
"""What 0.19 logs about its own next versions, by module."""


def without_advice() -> None:
    """Keep these lines from the console of a run, whose user can do nothing about them."""
    for module, words in _ADVICE.items():
        logging.getLogger(f"megatron.core.{module}").addFilter(partial(_is_not, words))


def _is_not(words: str, record: logging.LogRecord) -> bool:
    return words not in record.getMessage()
