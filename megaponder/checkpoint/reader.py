"""The contents of a checkpoint, read without a model, a process group or megatron-core.

`.metadata`, the index of its tensors, is a pickle in PyTorch's format; unpickling it freely would run whatever its
author wanted.  `index` builds the few classes that such an index consists of, and nothing else.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from megaponder.checkpoint.manifest import INDEX, Files
from megaponder.errors import UserError, first_line, is_lost_connection
from megaponder.files import read_bounded

BESIDES = ("optimizer.", "fp8.", "random.")
"""Prefixes of names that are not parameters."""
EMA = "optimizer.ema."
"""Prefix of the moving average of a parameter (`checkpoint.ema`)."""
MASTER = "optimizer.state.param."
"""Prefix of the FP32 master weight of a parameter."""

EXPERTS = ".mlp.experts.experts."
"""In the name of a tensor that holds the matrices of all experts of a layer."""

# Norms are stored under the names that they have inside Transformer Engine's fused layers.
_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}


LARGEST = 1 << 30
"""Maximum bytes of an index: it has about a hundred for each shard that a rank has written."""
_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it requires {module}.{name}")


def index(path: Path) -> Metadata:
    """PyTorch's index of a checkpoint's tensors; ValueError, in words that follow "because", if it is none."""
    try:
        found = _Unpickler(io.BytesIO(read_bounded(path / INDEX, LARGEST))).load()
        shards = {info.relative_path for info in found.storage_data.values()}
        objects = [n for n, m in found.state_dict_metadata.items() if not isinstance(m, TensorStorageMetadata)]
    except OSError as error:
        raise ValueError(f"{INDEX} cannot be read ({error.strerror})") from None
    except Exception as error:  # whatever corrupted bytes cause
        raise ValueError(f"{INDEX} is not an index of tensors ({error})") from None
    for name in sorted(map(str, shards)):
        if Path(name).name != name:
            raise ValueError(f"its {INDEX} names {name!r}, which is not a file in this folder")
        if not (path / name).is_file():
            raise ValueError(f"{name} is missing")
    if objects:
        raise ValueError(f"{objects[0]} is a pickled object, not a tensor")
    try:
        # lists shared by many tensors would take time quadratic in the file's size
        lists = {id(m.chunks) for m in found.state_dict_metadata.values()}
        if len(lists) < len(found.state_dict_metadata):
            raise ValueError("several of its tensors share one list of parts")
        holes = [n for n, m in found.state_dict_metadata.items() if not _covered(n, m, found)]
    except Exception as error:
        raise ValueError(f"{INDEX} is not an index of tensors ({error})") from None
    if holes:
        raise ValueError(f"its {INDEX} does not cover all of {holes[0]}")
    return found


def _covered(name: str, tensor: TensorStorageMetadata, index: Metadata) -> bool:
    """Whether chunks cover the complete tensor; anything missing would be read as uninitialised memory."""
    if not isinstance(tensor.size, torch.Size) or tensor.properties.dtype.is_complex:
        return False
    chunks = {chunk.offsets: chunk.sizes for chunk in tensor.chunks}
    inside = all(
        len(offset) == len(size) == len(tensor.size)
        and all(o >= 0 and o + n <= whole for o, n, whole in zip(offset, size, tensor.size, strict=True))
        for offset, size in chunks.items()
    )
    placed = all(MetadataIndex(name, offset) in index.storage_data for offset in chunks)
    return inside and placed and sum(size.numel() for size in chunks.values()) == tensor.size.numel()


def unlisted(path: Path, listed: Files) -> str | None:
    """What the index refers to and `listed` lacks: a file, or the end of one; ValueError as `index`."""
    ends: dict[str, int] = {}
    for info in index(path).storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        if name not in listed:
            return f"does not list {name}"
        if listed[name]["bytes"] < end:
            return f"lists {name} with {listed[name]['bytes']} bytes, and {INDEX} expects {end}"
    return None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """One sentence for whatever PyTorch and megatron-core raise for malformed files."""
    try:
        yield
    except (torch.OutOfMemoryError, UserError):
        raise
    except (Exception, CheckpointException) as error:
        if is_lost_connection(error):
            raise
        if isinstance(error, CheckpointException) and error.failures:  # by rank, with the trace of each
            rank, (cause, _) = next(iter(error.failures.items()))
            why = f"rank {rank}: {type(cause).__name__}: {first_line(cause)}"
        else:
            why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"Checkpoint {path} cannot be loaded ({why.partition('. ')[0].rstrip('.')}), although its files match its "
            "manifest; both were changed, or another version wrote them: use an earlier checkpoint or a copy."
        ) from error


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        found = index(Path(self.path))
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor by name; ValueError as `index`."""
    found = index(path).state_dict_metadata
    return {name: m for name, m in found.items() if isinstance(m, TensorStorageMetadata)}  # all of them are


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by name."""
    return {name: tuple(m.size) for name, m in tensors(path).items()}


def parameters(path: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of the model's parameters: full tensors, whatever layout saved them."""
    return {name: m for name, m in tensors(path).items() if not name.startswith(BESIDES)}


def beside(path: Path, prefix: str) -> dict[str, TensorStorageMetadata]:
    """The same of what is stored beside the parameters, by its whole name; empty if there is nothing."""
    return {name: m for name, m in tensors(path).items() if name.startswith(prefix)}


def module_name(name: str) -> str:
    """Name of a stored parameter in an unfused model's state dict."""
    for fused, plain in _NORMS.items():
        name = name.replace(fused, plain)
    return name


def read(path: Path, names: dict[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """Full tensors on the CPU."""
    state = {name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in names.items()}
    with reading(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to load in a single process": it is
        dcp.load(state, storage_reader=_Reader(str(path)), no_dist=True)
    return state
