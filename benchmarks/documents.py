"""What it does to the loss that a token attends to its own document only (`data.document_attention`).

    python -m benchmarks.documents --corpus CORPUS --length 2048
    python -m benchmarks.documents --corpus CORPUS --size tiny --bytes 3e5 --heldout 2000     (two CPU cores, a minute)

Every method is trained twice on the same text in the same order, with documents apart and joined, and both models read
the held-out text both ways: each document by itself, and all of it in the windows of the training.  The four numbers
have the same targets.  CORPUS: see `benchmarks.study`; sizes, rates and schedule are the study's.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import RESULTS, folder, number, parser, script, write
from benchmarks.report import origin
from benchmarks.study import corpus as texts
from benchmarks.study.rows import SEEDS, SIZES, Row, rows
from megaponder.errors import UserError

say = partial(print, flush=True)
BATCH = 32
HOW = {"joined": False, "apart": True}


def config(
    row: Row, text: texts.Corpus, run: Path, cuda: bool, length: int, micro_batch: int | None, apart: bool
) -> dict[str, Any]:
    """The row's configuration with samples of `length` tokens, as many tokens in a step."""
    made = row.config(text, str(run), cuda)
    batch = max(1, SIZES[row.size].batch * SIZES[row.size].length // length)
    made["model"] |= {"max_positions": length}
    made["data"] |= {"sequence_length": length, "document_attention": apart}
    made["train"] |= {"global_batch": batch, "micro_batch": micro_batch or batch}
    return made


def train(made: dict[str, Any], gpu: int | None = None) -> float:
    """Train the run, or go on with it, on this GPU if one is named; seconds.  UserError where it fails."""
    run, begin = Path(made["run"]), time.monotonic()
    run.mkdir(parents=True, exist_ok=True)
    (run / "documents.yaml").write_text(json.dumps(made))  # which is YAML, too
    with open(run / "train.log", "ab") as log:
        command = [sys.executable, "-m", "megaponder", "train", str(run / "documents.yaml")]
        on = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        code = subprocess.run(command, stdout=log, stderr=log, env=os.environ | on).returncode
    if code:
        raise UserError(f"{run}: training ended with exit code {code}; {run / 'train.log'} says why.")
    return time.monotonic() - begin


def read(run: Path, text: texts.Corpus, limit: int | None) -> dict[str, Any]:
    """Held-out losses of a trained run, read both ways: whole, and by kind of text (`limit` targets of each)."""
    from megaponder.inference import heldout

    cfg, state = heldout.read_model(run)
    named = {kind: text.path(f"heldout-{kind}") for kind in text.heldout if kind != "all"}
    found: dict[str, Any] = {"document_tokens": cfg.data.document_tokens}
    for how, apart in HOW.items():
        seen = replace(cfg, data=replace(cfg.data, document_attention=apart))
        scores = heldout.score_all(seen, state, named, BATCH, limit=limit)
        kinds = {kind: score.loss for kind, score in scores.items()}
        found[how] = {"loss": heldout.together(list(scores.values())).loss, "kinds": kinds}
    return found


def report(told: dict[str, Any]) -> str:
    """Markdown: a row for each trained model."""
    lines = [
        f"# Documents apart or joined, {told['size']}, samples of {told['length']} tokens",
        "",
        f"`{told['command']}`: {told['origin']}.",
        "",
        f"{told['tokens']:,} training tokens; a token's document has {told['document_tokens']:,.0f} tokens of its "
        "sample, in the mean over tokens.  Losses are those of the held-out text in nats, with the same targets.",
        "",
        "| method | trained | seed | read joined | read apart | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for r in told["rows"]:
        losses = " | ".join(f"{r[how]['loss']:.4f}" for how in HOW)
        lines.append(f"| {r['method']} | {r['trained']} | {r['seed']} | {losses} | {r['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


@script
def main(argv: list[str] | None = None) -> None:
    from megaponder.engine import cuda_on_cpu

    cuda_on_cpu.install()
    import torch

    options = parser("documents", __doc__)
    options.add_argument("--corpus", type=Path, metavar="FOLDER", required=True, help="the text")
    options.add_argument("--bytes", type=number(1.0), metavar="N", help="train on the first N bytes of all sources")
    options.add_argument("--size", choices=list(SIZES), default="6x256", help="backbone; default: 6x256")
    options.add_argument("--length", type=number(2), metavar="N", help="tokens of a sample; default: the size's")
    options.add_argument("--micro-batch", type=number(1), metavar="N", help="samples at once; default: a step's")
    options.add_argument("--tokens", type=number(1), metavar="N", help="training tokens; default: the size's")
    options.add_argument("--heldout", type=number(1), metavar="N", help="targets of each kind; default: all")
    kinds = ("vanilla", "loop", "pause", "ponderlm", "ponderlm2")
    options.add_argument("--methods", nargs="+", choices=kinds, default=["vanilla", "ponderlm"], help="rows")
    options.add_argument("--seeds", nargs="+", type=number(0), default=[SEEDS[0]], help="default: %(default)s")
    options.add_argument("--parallel", type=number(1), default=1, metavar="N", help="trainings at a time; default: 1")
    options.add_argument("--work", type=folder, default=Path("runs/documents"), help="runs; default: %(default)s")
    options.add_argument("--output", type=folder, default=RESULTS, help="results; default: benchmarks/results")
    args = options.parse_args(argv)
    size, cuda = SIZES[args.size], torch.cuda.is_available()
    length, tokens = args.length or size.length, args.tokens or size.tokens
    text = texts.ready(args.corpus, args.bytes, size.vocab - 1, args.work)
    known = {row.kind.name: row.kind for row in rows(args.size)}
    every: list[tuple[Row, str, Path]] = []
    for seed in args.seeds:
        for method in args.methods:
            row = Row(known[method], args.size, seed, 1.0, tokens)
            every += [(row, how, args.work / f"{args.size}.{length}.{tokens}.{row.short}.{how}") for how in HOW]
    made = [config(row, text, run, cuda, length, args.micro_batch, HOW[how]) for row, how, run in every]
    gpus = torch.cuda.device_count()
    on = [i % gpus if gpus > 1 else None for i in range(len(made))]
    with ThreadPoolExecutor(args.parallel) as pool:
        took = list(pool.map(train, made, on))
    found: list[dict[str, Any]] = []
    for (row, how, run), seconds in zip(every, took, strict=True):
        told = {"method": row.kind.name, "trained": how, "seed": row.seed, "seconds": seconds}
        found.append(told | read(run, text, args.heldout))
        losses = ", ".join(f"read {h} {found[-1][h]['loss']:.4f}" for h in HOW)
        say(f"{run.name}: {losses}, {seconds:.0f} s")
    results = {
        "size": args.size,
        "length": length,
        "tokens": row.steps * size.batch * size.length,
        "document_tokens": next(r["document_tokens"] for r in found if r["document_tokens"]),
        "command": shlex.join(["python", "-m", "benchmarks.documents", *(sys.argv[1:] if argv is None else argv)]),
        "origin": origin(),
        "rows": found,
    }
    write(args.output, f"documents-{args.size}-{length}", results, report(results))
    say(report(results))


if __name__ == "__main__":
    sys.exit(main())
