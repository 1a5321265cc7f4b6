"""What the processes of a test session share: imported once, by the one that they are forked from (`forkserver.py`).

On two slow cores these imports take longer than anything else in a small model's life.
"""

from __future__ import annotations

import multiprocessing.popen_fork  # noqa: F401
from pathlib import Path

import torch.distributed.checkpoint
import torch.utils.serialization.config  # noqa: F401

import megaponder.cli.train
from megaponder.config import yaml_file
from megaponder.config.load import from_mapping, to_mapping
from megaponder.config.resolve import resolve

if not Path("/dev/nvidiactl").exists():  # a process that has touched CUDA cannot be forked
    from megaponder.engine import cuda_on_cpu

    cuda_on_cpu.install()
    import megatron.core.dist_checkpointing
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.core.models.backends
    import megatron.core.optimizer
    import megatron.core.transformer.dot_product_attention
    import megatron.core.transformer.multi_token_prediction  # noqa: F401

    import megaponder.checkpoint.writers
    import megaponder.data.cache
    import megaponder.data.sample_order
    import megaponder.export.modeling_megaponder
    import megaponder.plan.memory
    import megaponder.ponder.settings
    import megaponder.training.job
    import megaponder.training.loop
    import megaponder.training.shared_folder  # noqa: F401

# what is made once in a process: the schema's documentation, its validators, tables of the YAML library
yaml_file.parse(yaml_file.to_text(to_mapping(resolve(from_mapping({"model": {"preset": "llama-125m"}})))), "")
