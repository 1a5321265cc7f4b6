"""The models of `benchmarks.long_context`: sizes, training, and their way through transformers' format."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.long_texts import Batch
from megaponder.config.resolve import resolve
from megaponder.config.schema import ModelConfig, RunConfig
from megaponder.errors import UserError

say = partial(print, flush=True)


@dataclass(frozen=True)
class Size:
    """Of the model and of its training."""

    layers: int
    hidden: int
    heads: int
    window: int
    longest: int
    tokens: int
    """Of a step."""
    steps: int
    """Before the roads part, and half as many after."""
    read: int
    """Held-out texts."""
    bytes: int
    """Text to train on."""
    lr: float = 1e-3


SIZES = {
    "6x256": Size(6, 256, 8, 256, 8192, 65536, 600, 48, 48_000_000),
    "2x64": Size(2, 64, 4, 64, 2048, 4096, 200, 24, 8_000_000, 3e-3),
    "tiny": Size(2, 32, 2, 32, 256, 1024, 8, 2, 300_000),
}


@dataclass(frozen=True)
class Road:
    """How a model goes on after its windows."""

    name: str
    features: dict[str, Any]
    length: int


def roads(size: Size, longest: int) -> list[Road]:
    freqkv = {"freqkv": {"capacity": size.window}}
    scaling = {"rope_type": "linear", "factor": longest / size.window}
    return [
        Road("plain", {}, size.window),
        Road("interpolation", {"rotary_scaling": scaling}, longest),
        Road("freqkv", freqkv, min(longest, 8 * size.window)),
        Road("freqkv, longest", freqkv, longest),
    ]


def llama(size: Size) -> ModelConfig:
    """Of bytes, for windows."""
    return ModelConfig(
        family="llama", num_layers=size.layers, hidden_size=size.hidden, num_heads=size.heads, vocab_size=256,
        vocab_multiple=64, max_positions=size.window,
    )  # fmt: skip


def engine_of(size: Size, road: Road, model: ModelConfig, cuda: bool) -> tuple[RunConfig, Any]:
    """That model with the road's features."""
    from megaponder.engine import build, groups
    from megaponder.ponder.settings import method_of

    cfg = RunConfig(model=replace(model, **road.features))
    cfg.data.sequence_length, cfg.train.steps = road.length, 1
    cfg.train.global_batch = cfg.train.micro_batch = max(1, size.tokens // road.length)
    cfg.precision.dtype = "bf16" if cuda else "fp32"
    cfg.optimizer.lr, cfg.optimizer.weight_decay = size.lr, 0.1
    cfg = resolve(cfg)
    return cfg, build.build_engine(cfg, method_of(cfg), groups.init(cfg))


def micro_batch(ids: Tensor, counts: Tensor) -> Any:
    from megaponder.data.batch import MicroBatch

    return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), counts[:, 1:].float().contiguous())


def train(engine: Any, cfg: RunConfig, batch: Batch, steps: int, size: Size, falls: bool, enough: float = 0.0) -> float:
    """Seconds; the learning rate rises over a tenth of the steps, and in the end `falls` to 0.

    With a loss below `enough` it ends.
    """
    from megaponder.training.optimizer import build_optimizer
    from megaponder.training.step import gradient_norm, update

    optimizer, begin = build_optimizer(cfg, engine.ddp), time.monotonic()
    for step in range(steps):
        rate = min(1.0, (step + 1) / (0.1 * steps)) * (min(1.0, (steps - step) / (0.5 * steps)) if falls else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = size.lr * rate
        engine.zero_grad()
        optimizer.zero_grad()
        drawn = micro_batch(*batch(cfg.train.micro_batch, cfg.data.sequence_length))
        found = engine.forward_backward([drawn], step, train=True)
        update(optimizer, gradient_norm(optimizer))
        if step in (0, steps // 2, steps - 1) or found.loss < enough:
            say(f"    step {step + 1}: loss {found.loss:.3f}, {time.monotonic() - begin:.0f} s")
        if found.loss < enough:
            break
    return time.monotonic() - begin


def command(*words: str | Path) -> None:
    """A command of `megaponder`, on the CPU."""
    line = [sys.executable, "-m", "megaponder", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    if done.returncode:
        raise UserError(f"{' '.join(line[2:])} failed: {(done.stderr or done.stdout).strip()[-2000:]}")


def exported(folder: Path, cfg: RunConfig, engine: Any) -> Path:
    """The folder `hf` in it: the model in transformers' format, or with modelling code of its own."""
    from megaponder.export.save import save_weights

    shutil.rmtree(folder, ignore_errors=True)
    cfg.run = str(folder / "run")
    save_weights(folder / "run" / "checkpoints", cfg, engine.stage)
    command("export", folder / "run", folder / "hf")
    return folder / "hf"


def started(folder: Path, size: Size, batch: Batch, cuda: bool, enough: float = 0.0) -> tuple[ModelConfig, Path]:
    """A Llama trained on windows, exported and imported, and its checkpoint: what lies in the folder, if it does."""
    from megaponder.checkpoint.folder import final, published
    from megaponder.checkpoint.weights import read_config

    if not published(folder / "imported" / "checkpoints"):
        say(f"  windows of {size.window}")
        cfg, engine = engine_of(size, Road("windows", {}, size.window), llama(size), cuda)
        train(engine, cfg, batch, size.steps, size, falls=False, enough=enough)
        hf = exported(folder / "windows", cfg, engine)
        if (hf / "modeling_megaponder.py").exists():
            raise UserError(f"{hf} is not in the format of transformers' Llama.")
        shutil.rmtree(folder / "imported", ignore_errors=True)
        command("import", hf, folder / "imported")
    path = final(folder / "imported" / "checkpoints", 0)
    return read_config(path).model, path


def cached(hf: Path, ids: Tensor, step: int, device: str) -> tuple[Tensor, dict[int, int]]:
    """An export that reads ids [b, n + 1] with a cache, `step` at a time: losses [b, n]; length -> bytes for a text."""
    from megaponder.decoding.model import CACHE_FIELD
    from megaponder.export.load import load_folder

    net = load_folder(hf, trust_remote_code=True).to(device)
    cache, found, held = None, [], {}
    for begin in range(0, ids.shape[1] - 1, step):
        given = ids[:, begin : begin + step]
        with torch.no_grad():
            out = net(given, use_cache=True, **{CACHE_FIELD: cache})
        cache = out[CACHE_FIELD]
        targets = ids[:, begin + 1 : begin + step + 1]
        logits = out.logits[:, : targets.shape[1]].float()
        found.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").cpu())
        size = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
        held[begin + given.shape[1]] = size // len(ids)
    return torch.cat(found, 1), held
