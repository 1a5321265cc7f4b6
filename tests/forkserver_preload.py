"""What the processes of a test session share: imported once, by the one that they are forked from (`forkserver.py`).

On two slow cores these imports take longer than anything else in a small model's life.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint  # noqa: F401

if not Path("/dev/nvidiactl").exists():  # a process that has touched CUDA cannot be forked
    from megaponder.engine import cuda_on_cpu

    cuda_on_cpu.install()
    import megatron.core.dist_checkpointing
    import megatron.core.optimizer  # noqa: F401

    import megaponder.export.modeling_megaponder
    import megaponder.ponder.settings
    import megaponder.training.job
    import megaponder.training.loop  # noqa: F401
