"""What FreqKV gives on texts far longer than the window a model was trained with, beside position interpolation.

    python -m benchmarks.long_context --corpus CORPUS                  one GPU, about eight minutes
    python -m benchmarks.long_context --corpus CORPUS --size 2x64      two CPU cores, some minutes
    python -m benchmarks.long_context --corpus CORPUS --size tiny      two CPU cores, two minutes: it only runs

A Llama of bytes is trained on windows of W bytes, exported to transformers' format and imported from there.  From these
weights, for as many bytes more each, go on:

    plain           windows of W bytes: beyond them it extrapolates
    interpolation   RoPE's positions divided by LONGEST / W, on texts of LONGEST bytes
    freqkv          capacity W, sink 4, ratio 0.5, on texts of 8 W bytes: beyond them it goes on as it does within
    freqkv, longest the same on texts of LONGEST bytes

All read held-out documents of at least LONGEST bytes from their start; the loss is told by place.  `moving window` is
the plain model that reads each byte after half a window to a window of others: what is to be had without a long memory.
The exports of `plain` and `freqkv` also read some texts with a cache, whose bytes are told by length.

The other part asks for facts: pairs of symbols somewhere in the first half of a text of noise, whose first is named
again in the second half, once; the answer is the second.  Recall is learnt before the roads part, on windows that ask
for facts over and over.  LONGEST is twice as long there.  CORPUS: see `benchmarks.study`.

What is done lies in the work folder, and a later call goes on from there.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import add_output, folder, number, parser, script, write
from benchmarks.long_roads import (
    SIZES,
    Road,
    Size,
    cached,
    engine_of,
    exported,
    micro_batch,
    roads,
    say,
    started,
    train,
)
from benchmarks.long_texts import NOISE, SYMBOLS, Batch, corpus_bytes, crops, facts
from benchmarks.report import origin
from megaponder.config.schema import ModelConfig

CACHED = 4
"""Texts that are read with a cache."""
FACTS_TAKE = 12
"""At most as many times the steps for text, before the roads part."""
RECALLED = 0.02
"""The loss of facts with which the roads part."""


def losses(engine: Any, ids: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Cross entropy of each target [b, n], 0 where it does not count."""
    found = []
    for some, of in zip(ids.split(rows), counts.split(rows), strict=True):
        read = micro_batch(some, of)
        found.append((engine.token_losses(read)[1][-1].t().cpu() * read.loss_mask_bn.cpu()).float())
    return torch.cat(found)


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


def right(engine: Any, batch: Batch, texts_of: int, n: int, tokens: int) -> float:
    """Share of right answers at that length, `tokens` at a time."""
    hits = total = 0
    for begin in range(0, texts_of, each := max(1, tokens // n)):
        ids, counts = batch(min(each, texts_of - begin), n)
        answers = engine.logits(ids[:, :-1])[..., : 2 * NOISE].argmax(-1)
        asked = counts[:, 1:].bool()
        hits += int((answers == ids[:, 1:])[asked].sum())
        total += int(asked.sum())
    return hits / total


def lengths_to(size: Size, longest: int) -> list[int]:
    """1, 2, 4 ... windows."""
    return [size.window << i for i in range(20) if size.window << i <= longest]


def result_of(road: Road) -> str:
    """The name of its file."""
    return f"{road.name.replace(', ', '-')}.json"


def run(
    work: Path, size: Size, longest: int, batch: Batch, cuda: bool, look: Callable[[Road, Any, Any], dict[str, Any]],
    begin: Callable[[], tuple[ModelConfig, Path]],
) -> list[Any]:  # fmt: skip
    """Train each road from the weights with which they `begin`; what `look` sees of each.  Nothing is done twice."""
    from megaponder.checkpoint import restore

    found: list[Any] = []
    for road in roads(size, longest):
        done = work / result_of(road)
        if not done.exists():
            model, start = begin()
            say(f"  {road.name}, texts of {road.length}")
            cfg, engine = engine_of(size, road, replace(model, max_positions=longest), cuda)
            restore.load(start, engine.stage)  # as `checkpoint.load` does
            told = {"road": road.name, "length": road.length}
            told["seconds"] = train(engine, cfg, batch, size.steps // 2, size, falls=True)
            partial = done.with_suffix(".partial")
            partial.write_text(json.dumps(told | look(road, cfg, engine)))
            partial.rename(done)
        found.append(json.loads(done.read_text()))
        say(f"    {found[-1]}")
    return found


def in_text(work: Path, size: Size, corpus: Path, cuda: bool, device: str) -> list[Any]:
    """Perplexities of each road by length, and of the moving window."""
    text, held = corpus_bytes(corpus, size.bytes, size.longest, size.read)
    held, rows = held.to(device), max(1, 2 * size.tokens // size.longest)
    say(f"{len(text):,} bytes of text, {len(held)} held-out texts of {size.longest}")

    def seen(found: Tensor) -> dict[str, Any]:
        return {"perplexity": perplexities(found, size), "last": last_window(found, size)}

    def read(road: Road, cfg: Any, engine: Any) -> dict[str, Any]:
        found = losses(engine, held, torch.ones_like(held), rows)
        told: dict[str, Any] = {"read": len(held), **seen(found)}
        if road.name == "plain":
            told["moving"] = seen(moving_window(engine, held, size))
        if road.name in ("plain", "freqkv"):
            hf = exported(work / road.name, cfg, engine)
            again, sizes = cached(hf, held[:CACHED], size.window // 2, device)
            told["cached"] = {
                "loss": float(again.mean()), "uncached": float(found[:CACHED].mean()),
                "bytes": {n: sizes[n] for n in lengths_to(size, size.longest)},
            }  # fmt: skip
        return told

    batch = crops(text, device)
    of_text = run(work, size, size.longest, batch, cuda, read, partial(started, work, size, batch, cuda))
    moving = {"road": "moving window", "length": size.window, "seconds": of_text[0]["seconds"]}
    return [*of_text, moving | of_text[0]["moving"]]


def of_facts(work: Path, size: Size, cuda: bool, device: str) -> list[Any]:
    """Share of right answers of each road by length, to twice the longest."""
    longest = 2 * size.longest
    say(f"facts in noise, up to {longest}")

    def answered(road: Road, cfg: Any, engine: Any) -> dict[str, Any]:
        asked = facts(device, seed=3, once=True)
        return {"right": {n: right(engine, asked, size.read, n, size.tokens) for n in lengths_to(size, longest)}}

    longer = replace(size, steps=FACTS_TAKE * size.steps)
    begin = partial(started, work, longer, facts(device), cuda, RECALLED)
    return run(work, size, longest, facts(device, once=True), cuda, answered, begin)


def report(told: dict[str, Any]) -> str:
    """Markdown of the parts that there are: tables of perplexity and of a cache's size by length, one of answers."""
    lines = [
        f"# Longer texts than the window: {told['name']}, windows of {told['size']['window']} bytes",
        "",
        f"`{told['command']}`: {told['origin']}.",
    ]
    if rows := told.get("text"):
        lengths = list(rows[0]["perplexity"])
        title = f"Perplexity per byte of {rows[0]['read']} held-out texts up to a length, and of their last window."
        lines += table(title, ["model", "trained on texts of", "s", *lengths, "last"], [
            [row["road"], row["length"], f"{row['seconds']:.0f}", *(f"{x:.3f}" for x in row["perplexity"].values()),
             f"{row['last']:.3f}"] for row in rows
        ])  # fmt: skip
        title = (
            f"Exports that read {CACHED} of them with a cache in FP32: bytes of keys and values of a text by length."
        )
        lines += table(title, ["model", "nats per byte", "without cache", *lengths], [
            [row["road"], f"{c['loss']:.4f}", f"{c['uncached']:.4f}", *(f"{x:,}" for x in c["bytes"].values())]
            for row in rows if (c := row.get("cached"))
        ])  # fmt: skip
    if rows := told.get("facts"):
        title = f"Facts: share of right answers by the text's length; by chance {1 / SYMBOLS:.0%}."
        lines += table(title, ["model", "trained on texts of", *rows[0]["right"]], [
            [row["road"], row["length"], *(f"{x:.1%}" for x in row["right"].values())] for row in rows
        ])  # fmt: skip
    return "\n".join(lines) + "\n"


def table(title: str, head: list[Any], rows: list[list[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    return ["", title, "", *(f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows))]


@script
def main(argv: list[str] | None = None) -> int:
    options = parser("long_context", __doc__)
    options.add_argument("--corpus", type=Path, required=True)
    options.add_argument("--size", choices=list(SIZES), default="6x256")
    options.add_argument("--steps", type=number(2), help="before the roads part; default: the size's")
    options.add_argument("--part", choices=["text", "facts"], help="only this one (and what is done of the other)")
    options.add_argument("--work", type=folder, default=Path("runs/long-context"), help="default: %(default)s")
    add_output(options)
    args = options.parse_args(argv)
    size = SIZES[args.size]
    size = size if args.steps is None else replace(size, steps=args.steps)
    cuda = torch.cuda.is_available()
    if not cuda:
        from megaponder.engine import cuda_on_cpu

        cuda_on_cpu.install()
    device = "cuda" if cuda else "cpu"
    work = args.work / f"{args.size}-{size.steps}"
    told: dict[str, Any] = {}
    for part in ("text", "facts"):
        (work / part).mkdir(parents=True, exist_ok=True)
        if args.part in (None, part) or all((work / part / result_of(r)).exists() for r in roads(size, 1)):
            if part == "text":
                told[part] = in_text(work / part, size, args.corpus, cuda, device)
            else:
                told[part] = of_facts(work / part, size, cuda, device)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    told |= {
        "name": args.size, "command": shlex.join(["python", "-m", "benchmarks.long_context", *(argv or sys.argv[1:])]),
        "origin": origin(), "size": vars(size),
    }  # fmt: skip
    write(args.output, f"long-context-{args.size}", told, report(told))
    say(report(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
