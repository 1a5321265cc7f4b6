"""What lies in a checkpoint, read without a model, a process group or megatron-core."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

BESIDES = ("optimizer.", "random.")
"""First parts of names that are no parameter's."""

# Norms are stored under the names that they have inside Transformer Engine's fused layers.
_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}


def shapes(path: Path) -> dict[str, tuple[int, ...] | None]:
    """Names of all tensors and objects; an object has no shape."""
    found = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    return {name: tuple(m.size) if isinstance(m, TensorStorageMetadata) else None for name, m in found.items()}


def tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor by name."""
    found = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    return {name: m for name, m in found.items() if isinstance(m, TensorStorageMetadata)}


def parameters(path: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of the model's parameters: whole tensors, whatever layout saved them."""
    return {name: m for name, m in tensors(path).items() if not name.startswith(BESIDES)}


def module_name(name: str) -> str:
    """Name of a stored parameter in an unfused model's state dict."""
    for fused, plain in _NORMS.items():
        name = name.replace(fused, plain)
    return name


def read(path: Path, names: dict[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """Whole tensors on the CPU."""
    state = {name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in names.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to load in a single process": it is
        dcp.load(state, storage_reader=dcp.FileSystemReader(str(path)), no_dist=True)
    return state
