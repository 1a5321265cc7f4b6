"""PyTorch's flight recorder: a rank's last collectives, with their shapes, their state and where they were called.

`torchfrtrace RUN/stacks -p collectives_` compares those of all ranks.  A rank writes them when it hangs, and NCCL's own
watchdog when a collective fails or its time is over.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

PREFIX = "collectives_"


def record(run: Path) -> None:
    """Keep the last 2,000 collectives; NCCL's watchdog writes them into the run folder.  Call it before process groups
    are made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):  # now, and before PyTorch 2.9
        os.environ.setdefault(name, str((run / "stacks" / PREFIX).absolute()))


def write(folder: Path, rank: int) -> Path | None:
    """Write what was recorded into `folder`; None where this PyTorch has no recorder."""
    from torch._C import _distributed_c10d as bindings

    over_nccl = dist.is_initialized() and dist.get_backend() == "nccl"  # a hang may have ended with the groups
    name = "_dump_nccl_trace" if over_nccl else "_dump_fr_trace"
    if not hasattr(bindings, name):
        return None
    path = folder / f"{PREFIX}{rank}"  # as the watchdog names it
    path.write_bytes(getattr(bindings, name)())
    return path
