"""PyTorch's flight recorder: a rank's last collectives, with their shapes, their state and where they were called.

`torchfrtrace RUN/stacks -p collectives_` compares those of all ranks.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

PREFIX = "collectives_"


def record() -> None:
    """Keep the last 2,000 collectives.  Call it before process groups are made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")


def write(folder: Path, rank: int) -> Path | None:
    """Write what was recorded into `folder`; None where this PyTorch has no recorder."""
    from torch._C import _distributed_c10d as bindings

    name = "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace"
    if not hasattr(bindings, name):
        return None
    path = folder / f"{PREFIX}{rank:05d}"
    path.write_bytes(getattr(bindings, name)())
    return path
