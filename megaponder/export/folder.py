"""An export folder on disk: safetensors shards, JSON files, and publication by one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from megaponder import files
from megaponder.errors import UserError

SHARD_BYTES = 5 * 10**9
"""Largest weight file, as on the Hugging Face hub."""


@contextmanager
def published(out: Path, force: bool) -> Iterator[Path]:
    """A temporary folder that becomes `out` by a rename when the block ends, and is deleted when it fails.

    An existing `out` is refused, or replaced with `force` if it looks like a model folder (it has a config.json).
    """
    out = Path(os.path.realpath(out))  # resolve() has no sentence for a link that leads to itself
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not force:
            raise UserError(f"{out} exists already; choose another folder, or say --force to replace it.")
        if not (out / "config.json").is_file():
            raise UserError(f"{out} has no config.json, so it is no model folder and --force does not replace it.")
    temporary, old = (out.with_name(f".{out.name}.{kind}-{os.getpid()}") for kind in ("partial", "replaced"))
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in [*temporary.iterdir(), temporary]:
            files.sync(path)
        if out.exists():
            out.rename(old)
        temporary.rename(out)
        files.sync(out.parent)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}.") from error
    finally:
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; UserError if it is missing or is none."""
    try:
        if files.is_special(path):
            raise UserError(f"{path} is a pipe or a device.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return value


def write_weights(folder: Path, tensors: dict[str, Tensor], shard_bytes: int = SHARD_BYTES) -> list[str]:
    """model.safetensors, or several files with an index; returns the files' names."""
    from huggingface_hub import split_torch_state_dict_into_shards

    # rows of a larger table are views of it, and safetensors refuses what shares memory
    tensors = {name: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for name, t in tensors.items()}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_bytes)
    for filename, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / filename, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    return list(split.filename_to_tensors)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files; pickled weights are refused."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise UserError(f"{index} has no weight_map from tensors to files.")
        names = sorted(set(listed.values()))
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        why = "none is there"
        if pickled:
            why = f"{pickled[0]} is pickled, and unpickling runs code; convert it with transformers"
        raise UserError(f"{folder} has no model.safetensors: {why}.")
    tensors: dict[str, Tensor] = {}
    for name in names:
        if "/" in name:
            raise UserError(f"{index} names {name!r}, which is no file of this folder.")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing.")
        try:
            tensors |= load_file(folder / name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{folder / name} cannot be read: {error}.") from error
    return tensors
