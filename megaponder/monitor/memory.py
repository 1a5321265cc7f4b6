"""What PyTorch's CUDA allocator reports."""

from __future__ import annotations


def cuda_memory() -> dict[str, float]:
    """Reserved bytes and allocation retries of this process's device; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "cuda_memory_reserved_bytes": float(torch.cuda.memory_reserved()),
        "cuda_alloc_retries": float(stats.get("num_alloc_retries", 0)),
    }
