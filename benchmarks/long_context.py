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
        found.append((engine.token_losses(read)[1][-1].t().cpu() * read.loss_mask_bn.cpu()).float())
    return torch.cat(found)


# --- bytes ------------------------------------------------------------------------------------------------------------
def corpus_bytes(corpus: Path, size: Size) -> tuple[Tensor, Tensor]:
    """(Training text [bytes], held-out texts [b, longest + 1]); documents are joined by a 0."""
    kept, held = 0, []
    train: list[bytes] = []
    for path in texts.inputs(corpus, "train"):
        for document in texts.documents(path):
            if kept < size.bytes:
                train.append(document["text"].encode() + b"\0")
                kept += len(train[-1])
    for path in texts.inputs(corpus, "heldout"):
        for document in texts.documents(path):
            if len(text := document["text"].encode()) > size.longest and len(held) < size.read:
                held.append(torch.frombuffer(bytearray(text[: size.longest + 1]), dtype=torch.uint8))
    if not held:
        raise UserError(f"--corpus {corpus}: none of its held-out texts has more than {size.longest} bytes.")
    return torch.frombuffer(bytearray(b"".join(train)), dtype=torch.uint8), torch.stack(held).long()


def crops(text: Tensor, device: str) -> Batch:
    """Pieces of a text at random places."""
    draw, text = torch.Generator().manual_seed(1), text.to(device)

    def batch(b: int, n: int) -> tuple[Tensor, Tensor]:
        begin = torch.randint(0, len(text) - n - 1, (b, 1), generator=draw).to(device)
        ids = text[begin + torch.arange(n + 1, device=device)].long()
        return ids, torch.ones_like(ids)

    return batch


def perplexities(found: Tensor, size: Size) -> dict[int, float]:
    """Length -> perplexity per byte of all targets up to it, for 1, 2, 4 ... windows."""
    lengths = [size.window << i for i in range(20) if size.window << i <= size.longest]
    return {n: float(found[:, :n].double().mean().exp()) for n in lengths}


def last_window(found: Tensor, size: Size) -> float:
    """Of the last of all windows."""
    return float(found[:, -size.window :].double().mean().exp())


def moving_window(engine: Any, ids: Tensor, size: Size) -> Tensor:
    """Losses of a plain model that reads windows, each of which begins half a window after the last."""
    half, b = size.window // 2, len(ids)
    windows = ids.unfold(1, size.window + 1, half)  # [b, windows, W + 1]
    found = losses(engine, windows.flatten(0, 1), torch.ones_like(windows).flatten(0, 1), 64).view(b, -1, size.window)
    return torch.cat([found[:, 0, :half], found[:, :, half:].flatten(1)], 1)


# --- facts ------------------------------------------------------------------------------------------------------------
def facts(device: str, seed: int = 2) -> Batch:
    """Texts of noise with pairs (key, value) in the first half and the keys again in the second, where values count."""
    draw = torch.Generator().manual_seed(seed)

    def batch(b: int, n: int) -> tuple[Tensor, Tensor]:
        asked = max(FACTS, n // 16)
        ids = torch.randint(NOISE, 2 * NOISE, (b, n + 1), generator=draw)
        counts = torch.zeros_like(ids)
        keys = torch.rand(b, SYMBOLS, generator=draw).argsort(1)[:, :FACTS]
        values = torch.randint(SYMBOLS, 2 * SYMBOLS, (b, FACTS), generator=draw)
        told = 2 * torch.rand(b, n // 4, generator=draw).argsort(1)[:, :FACTS]  # even places of the first half
        again = n // 2 + 2 * torch.rand(b, n // 4, generator=draw).argsort(1)[:, : min(asked, n // 4)]
        which = torch.randint(0, FACTS, again.shape, generator=draw)
        for at, key, value in ((told, keys, values), (again, keys.gather(1, which), values.gather(1, which))):
            ids.scatter_(1, at, key)
            ids.scatter_(1, at + 1, value)
        counts.scatter_(1, again + 1, 1)
        return ids.to(device), counts.to(device)

    return batch


def right(engine: Any, batch: Batch, texts_of: int, n: int) -> float:
    """Share of right answers at that length."""
    hits = total = 0
    for _ in range(texts_of):
        ids, counts = batch(1, n)
        answers = engine.logits(ids[:, :-1])[..., : 2 * NOISE].argmax(-1)
        asked = counts[:, 1:].bool()
        hits += int((answers == ids[:, 1:])[asked].sum())
        total += int(asked.sum())
    return hits / total


def run(size: Size, longest: int, batch: Batch, cuda: bool, look: Callable[[Road, Any], dict[str, Any]]) -> list[Any]:
    """Train the windows, then each road from their weights; what `look` sees of each."""
    windows = Road("windows", {}, size.window)
    say(f"  windows of {size.window}")
    cfg, engine = engine_of(size, windows, longest, cuda)
    spent = train(engine, cfg, batch, size.steps, size, falls=False)
    start = {name: value.detach().clone() for name, value in engine.stage.named_parameters()}
    found = []
    for road in roads(size, longest):
        say(f"  {road.name}, texts of {road.length}")
        cfg, engine = engine_of(size, road, longest, cuda)
        with torch.no_grad():
            for name, value in engine.stage.named_parameters():
                value.copy_(start[name])
        seconds = train(engine, cfg, batch, size.steps // 2, size, falls=True)
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
