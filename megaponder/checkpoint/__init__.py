"""State on disk: sharded, atomic, checksummed, and independent of the layout that wrote it.

`load_weights` and `inspect_checkpoint` need neither a process group nor megatron-core.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CheckpointInfo", "inspect_checkpoint", "load_weights"]


def __getattr__(name: str) -> Any:  # torch is imported when a function is asked for, not with the package
    if name in ("CheckpointInfo", "inspect_checkpoint"):
        from megaponder.checkpoint import info

        return getattr(info, name)
    if name == "load_weights":
        from megaponder.checkpoint.weights import load_weights

        return load_weights
    raise AttributeError(name)
