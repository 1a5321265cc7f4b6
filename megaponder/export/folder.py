"""An export folder on disk: safetensors shards, JSON files, and publication by one rename."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

from megaponder import files, processes
from megaponder.errors import UserError

SHARD_BYTES = 5 * 10**9
"""Largest weight file, as on the Hugging Face hub."""


@contextmanager
def published(out: Path, force: bool) -> Iterator[Path]:
    """A temporary folder that is renamed to `out` when the block ends, and deleted if it fails.

    An existing `out` is refused, or replaced with `force` if it looks like a model folder (it has a config.json).
    Remains of a killed export beside `out` are deleted, or moved back if they are the replaced folder.
    """
    files.refuse_lost_link(out)
    out = Path(os.path.realpath(out))  # resolve() has no useful error for a link to itself
    _sweep(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not force:
            raise UserError(f"{out} already exists; choose another folder, or say --force to replace it.")
        if not (out / "config.json").is_file():
            raise UserError(f"{out} has no config.json, so it is not a model folder and --force does not replace it.")
    mine = f"{socket.gethostname()}-{os.getpid()}"
    temporary, old = (out.with_name(f".{out.name}.{kind}-{mine}") for kind in (_PARTIAL, _REPLACED))
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            path.chmod(0o666 & ~_umask())  # safetensors creates files that only the owner can read
        for path in [*temporary.iterdir(), temporary]:
            files.sync(path)
        if out.exists():
            out.rename(old)
        temporary.rename(out)
        files.sync(out.parent)
    except Exception as error:
        if (number := _system_error(error)) is None:
            raise
        raise UserError(f"{out} cannot be written: {os.strerror(number)}.") from error
    finally:
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


_PARTIAL, _REPLACED = "partial", "replaced"
_DAY = 24 * 3600


def _sweep(out: Path) -> None:
    """Remove remains of killed exports to `out`; a folder that was about to be replaced is restored."""
    for path in sorted(out.parent.glob(f".{glob.escape(out.name)}.*-*")):  # replaced ones last
        kind, _, owner = path.name.removeprefix(f".{out.name}.").partition("-")
        if kind not in (_PARTIAL, _REPLACED) or _lives(owner, path.stat().st_mtime):
            continue
        if kind == _REPLACED and not out.exists():
            path.rename(out)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _lives(owner: str, since: float) -> bool:
    """Whether process HOST-PID may still be working on files last changed at `since`; on other hosts, for a day."""
    host, _, pid = owner.rpartition("-")
    if host != socket.gethostname() or not pid.isdecimal():
        return bool(host) and time.time() - since < _DAY
    try:  # the process id may have been reused by another program
        return processes.runs(int(pid)) and psutil.Process(int(pid)).create_time() <= since
    except psutil.Error:
        return False


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _system_error(error: Exception) -> int | None:
    """The error number of an error; Rust libraries leave it in their text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found and not isinstance(error, UserError) else None


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


LARGEST_JSON = 1 << 26
"""Maximum bytes of a config.json or an index of weights: the largest published index has 9 MB."""
LARGEST_HEADER = 1 << 25
"""Bytes of the JSON at the beginning of a safetensors file."""


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """An object from a JSON file in an untrusted folder; UserError if it is missing, too large or not an object."""
    path = folder / name
    try:
        value = json.loads(files.read_bounded(files.inside(folder, name), LARGEST_JSON).decode())
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except RecursionError:
        raise UserError(f"{path} cannot be read: it is nested too deeply.") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must contain a JSON object.")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """An untrusted config.json; UserError for quantised weights too, and a model_type that is no string."""
    fields = read_json(folder, "config.json")
    if not isinstance(kind := fields.get("model_type"), str | None):
        raise UserError(f"{folder / 'config.json'}: model_type = {kind!r}: it must be a string.")
    if fields.get("quantization_config"):
        raise UserError(f"{folder}: its weights are quantised (quantization_config), which is not supported.")
    return fields


def has_tokenizer(folder: Path) -> bool:
    """Whether an untrusted folder has a tokenizer.json; UserError if its files are links that leave the folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        files.inside(folder, name)
    return (folder / "tokenizer.json").is_file()


def write_weights(folder: Path, tensors: dict[str, Tensor], shard_bytes: int = SHARD_BYTES) -> list[str]:
    """model.safetensors, or several files with an index; returns the files' names."""
    from huggingface_hub import split_torch_state_dict_into_shards

    # rows of a larger table are views, and safetensors rejects tensors that share memory
    tensors = {name: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for name, t in tensors.items()}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_bytes)
    for filename, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / filename, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    return list(split.filename_to_tensors)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files; pickled weights are refused, as are files outside the folder."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    paths = {name: files.inside(folder, name) for name in _weight_files(folder)}
    for name, path in paths.items():
        if not path.is_file():
            raise UserError(f"{folder / name} is missing.")
    need, free = sum(p.stat().st_size for p in paths.values()), psutil.virtual_memory().available
    if need > free:
        raise UserError(f"{folder}: its weights take {need:,} bytes, but only {free:,} bytes of memory are free.")
    tensors: dict[str, Tensor] = {}
    for name, path in paths.items():
        try:
            _check_header(path)
            tensors |= load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{folder / name} cannot be read: {error}.") from error
    for name, tensor in tensors.items():  # masks in old files have other types
        if tensor.dtype not in FLOATS and (tensor.is_floating_point() or name.endswith("weight")):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{folder}: {name} is {dtype}: quantised weights are not supported; use unquantised ones.")
    return tensors


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _weight_files(folder: Path) -> list[str]:
    """Names of a folder's weight files, as its index gives them."""
    index = "model.safetensors.index.json"
    if (folder / index).is_file():
        listed = read_json(folder, index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise UserError(f"{folder / index} has no weight_map from tensors to files.")
        return sorted(set(listed.values()))
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    pickled = sorted(p.name for p in folder.glob("*.bin"))
    why = "there are no weights"
    if pickled:
        why = f"{pickled[0]} is pickled, and unpickling runs code; convert it with transformers"
    raise UserError(f"{folder} has no model.safetensors: {why}.")


def _check_header(path: Path) -> None:
    """ValueError for a header so large that reading it would take long."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if LARGEST_HEADER < size <= path.stat().st_size:
        raise ValueError(f"its header has {size:,} bytes, more than {LARGEST_HEADER:,}")
