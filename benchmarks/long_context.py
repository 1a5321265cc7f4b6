"""What FreqKV gives on texts far longer than the window a model was trained with, beside position interpolation.

    python -m benchmarks.long_context --corpus CORPUS                  one GPU, about three minutes
    python -m benchmarks.long_context --corpus CORPUS --size tiny      two CPU cores, a minute: it only runs

A model of bytes is trained on windows of W bytes.  From its weights, for as many bytes more each, go on:

    plain           windows of W bytes: beyond them it extrapolates
    interpolation   RoPE's positions divided by LONGEST / W, on texts of LONGEST bytes
    freqkv          capacity W, sink 4, ratio 0.5, on texts of 8 W bytes: beyond them it goes on as it does within
    freqkv, longest the same on texts of LONGEST bytes

All read held-out documents of at least LONGEST bytes from their start; the loss is told by place.  `moving window` is
the plain model that reads each byte after half a window to a window of others: what is to be had without a long memory.

The second half asks for facts: pairs of symbols somewhere in the first half of a text of noise, whose first is named
again in the second half; the answer is the second.  LONGEST is twice as long there.  CORPUS: see `benchmarks.study`.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import add_output, number, parser, script, write
from benchmarks.report import origin
from benchmarks.study import corpus as texts
from megaponder.config.resolve import resolve
from megaponder.config.schema import ModelConfig, RunConfig
from megaponder.errors import UserError

say = partial(print, flush=True)
SYMBOLS, FACTS, NOISE = 32, 8, 64
"""Keys are 0 .. 31, values 32 .. 63, noise 64 .. 127."""


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
    "tiny": Size(2, 32, 2, 32, 256, 1024, 8, 2, 300_000),
}
Batch = Callable[[int, int], tuple[Tensor, Tensor]]
"""(texts, their length) -> ids [b, n + 1], and whether each id counts as a target [b, n + 1]."""


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


def engine_of(size: Size, road: Road, longest: int, cuda: bool) -> tuple[RunConfig, Any]:
    """A model of bytes with the road's features."""
    from megaponder.engine import build, groups
    from megaponder.ponder.settings import method_of

    model = ModelConfig(
        family="llama", num_layers=size.layers, hidden_size=size.hidden, num_heads=size.heads, vocab_size=256,
        vocab_multiple=64, max_positions=longest, **road.features,
    )  # fmt: skip
    cfg = RunConfig(model=model)
    cfg.data.sequence_length, cfg.train.steps = road.length, 1
    cfg.train.global_batch = cfg.train.micro_batch = max(1, size.tokens // road.length)
    cfg.precision.dtype = "bf16" if cuda else "fp32"
    cfg.optimizer.lr, cfg.optimizer.weight_decay = size.lr, 0.1
    cfg = resolve(cfg)
    return cfg, build.build_engine(cfg, method_of(cfg), groups.init(cfg))


def micro_batch(ids: Tensor, counts: Tensor) -> Any:
    from megaponder.data.batch import MicroBatch

    return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), counts[:, 1:].float().contiguous())


def train(engine: Any, cfg: RunConfig, batch: Batch, steps: int, size: Size, falls: bool) -> float:
    """Seconds; the learning rate rises over a tenth of the steps, and in the end `falls` to 0."""
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
        if step in (0, steps // 2, steps - 1):
            say(f"    step {step + 1}: loss {found.loss:.3f}, {time.monotonic() - begin:.0f} s")
    return time.monotonic() - begin


def losses(engine: Any, ids: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Cross entropy of each target [b, n], 0 where it does not count."""
    found = []
    for some, of in zip(ids.split(rows), counts.split(rows), strict=True):
        read = micro_batch(some, of)
        told = {"road": road.name, "length": road.length, "seconds": seconds, "before": spent}
        found.append(told | look(road, engine))
        say(f"    {found[-1]}")
    return found


def report(told: dict[str, Any]) -> str:
    """Markdown: a table of perplexity by length, one of answers by length."""
    size = told["size"]
    lines = [
        f"# Longer texts than the window: {told['name']}, windows of {size['window']} bytes",
        "",
        f"`{told['command']}`: {told['origin']}. Perplexity per byte of {told['read']} held-out texts up to a length; "
        "the last column is that of the last window alone.",
        "",
    ]
    lengths = list(told["text"][0]["perplexity"])
    lines += ["| model | trained on texts of | s | " + " | ".join(map(str, lengths)) + " | last |"]
    lines += ["|---" * (len(lengths) + 4) + "|"]
    for row in told["text"]:
        values = " | ".join(f"{x:.3f}" for x in row["perplexity"].values())
        lines.append(f"| {row['road']} | {row['length']} | {row['seconds']:.0f} | {values} | {row['last']:.3f} |")
    lengths = list(told["facts"][0]["right"])
    lines += ["", f"Facts: share of right answers by the text's length; by chance {1 / SYMBOLS:.0%}.", ""]
    lines += [
        "| model | trained on texts of | " + " | ".join(map(str, lengths)) + " |",
        "|---" * (len(lengths) + 2) + "|",
    ]
    for row in told["facts"]:
        values = " | ".join(f"{x:.1%}" for x in row["right"].values())
        lines.append(f"| {row['road']} | {row['length']} | {values} |")
    return "\n".join(lines) + "\n"


@script
def main(argv: list[str] | None = None) -> int:
    options = parser("long_context", __doc__)
    options.add_argument("--corpus", type=Path, required=True)
    options.add_argument("--size", choices=list(SIZES), default="6x256")
    options.add_argument("--steps", type=number(2), help="before the roads part; default: the size's")
    add_output(options)
    args = options.parse_args(argv)
    size = SIZES[args.size]
    size = size if args.steps is None else Size(**{**vars(size), "steps": args.steps})
    text, held = corpus_bytes(args.corpus, size)
    cuda = torch.cuda.is_available()
    if not cuda:
        from megaponder.engine import cuda_on_cpu

        cuda_on_cpu.install()
    device = "cuda" if cuda else "cpu"
    held = held.to(device)
    rows = max(1, 2 * size.tokens // size.longest)
    moving: dict[str, Any] = {}

    def read(road: Road, engine: Any) -> dict[str, Any]:
        if road.name == "plain":
            seen = moving_window(engine, held, size)
            moving.update(perplexity=perplexities(seen, size), last=last_window(seen, size))
        seen = losses(engine, held, torch.ones_like(held), rows)
        return {"perplexity": perplexities(seen, size), "last": last_window(seen, size)}

    say(f"{len(text):,} bytes of text, {len(held)} held-out texts of {size.longest}")
    of_text = run(size, size.longest, crops(text, device), cuda, read)
    of_text.append({"road": "moving window", "length": size.window, "seconds": of_text[0]["seconds"], **moving})
    longest = 2 * size.longest
    lengths = [size.window << i for i in range(20) if size.window << i <= longest]
    say(f"facts in noise, up to {longest}")

    def answered(road: Road, engine: Any) -> dict[str, Any]:
        return {"right": {n: right(engine, facts(device, seed=3), max(1, size.read // 4), n) for n in lengths}}

    of_facts = run(size, longest, facts(device), cuda, answered)
    told = {
        "name": args.size, "command": shlex.join(["python", "-m", "benchmarks.long_context", *(argv or sys.argv[1:])]),
        "origin": origin(), "size": vars(size), "read": len(held), "text": of_text, "facts": of_facts,
    }  # fmt: skip
    write(args.output, f"long-context-{args.size}", told, report(told))
    say(report(told))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
