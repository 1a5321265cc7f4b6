"""What it does to the loss that a token attends to its own document only (`data.document_attention`).

    python -m benchmarks.documents --corpus CORPUS --length 4096 --parallel 8 --minutes 5
    python -m benchmarks.documents --corpus CORPUS --size tiny --bytes 3e5 --heldout 2000     (two CPU cores, a minute)

Every method is trained twice on the same text in the same order, with documents apart and joined, and both models read
the held-out text both ways: each document by itself, and all of it in the windows of the training.  The four numbers
have the same targets.  CORPUS: see `benchmarks.study`; sizes, rates and schedule are the study's.  A model whose JSON
lies in the folder of results is not trained again; one that was cut off goes on.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import RESULTS, folder, number, parser, script, typed, write
from benchmarks.study import corpus as texts
from benchmarks.study import evaluation, queue
from benchmarks.study.rows import SEEDS, SIZES, Row, rows

say = partial(print, flush=True)
HOW = {"joined": False, "apart": True}
READ_AT_ONCE = 32768
"""Tokens of held-out text in a batch: attention with a mask in FP32 takes memory."""
prepare = evaluation.prepare


def config(
    row: Row, text: texts.Corpus, run: Path, cuda: bool, length: int, micro_batch: int | None, apart: bool
) -> dict[str, Any]:
    """The row's configuration with samples of `length` tokens, as many tokens in a step."""
    made = row.config(text, str(run), cuda)
    batch = max(1, SIZES[row.size].batch * SIZES[row.size].length // length)
    made["model"] |= {"max_positions": length}
    made["data"] |= {"sequence_length": length, "document_attention": apart}
    made["train"] |= {"global_batch": batch, "micro_batch": micro_batch or batch, "eval_every": 0}
    return made | {"checkpoint": {"every": 0}}


def job(told: dict[str, Any], made: dict[str, Any], text: texts.Corpus, out: Path, limit: int | None) -> queue.Job:
    """A model for the queue, which this module's `evaluate` then reads; `told` goes into its result."""
    from megaponder.config.load import from_mapping
    from megaponder.config.resolve import resolve
    from megaponder.plan.flops import mean_needed
    from megaponder.ponder.settings import method_of

    run, cfg = Path(made["run"]), resolve(from_mapping(made))
    task = {"row": told, "corpus": asdict(text), "config": made, "out": str(out), "command": told["command"]}
    queue.write(run / "row.json", task | {"evaluate": "benchmarks.documents", "limit": limit})
    tokens = cfg.train.steps * cfg.train.global_batch * cfg.data.sequence_length
    return queue.Job(out.stem, run / "row.json", run / "row.log", mean_needed(cfg, method_of(cfg)) * tokens)


def evaluate(run: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Held-out losses of a trained run, read both ways: whole, and by kind of text (`limit` targets of each)."""
    from megaponder.inference import heldout

    cfg, state = heldout.read_model(run)
    place, kinds = Path(task["corpus"]["folder"]), [kind for kind in task["corpus"]["heldout"] if kind != "all"]
    named = {kind: str(place / f"heldout-{kind}") for kind in kinds}
    found: dict[str, Any] = {"document_tokens": cfg.data.document_tokens}
    batch = max(1, READ_AT_ONCE // cfg.data.sequence_length)
    for how, apart in HOW.items():
        seen = replace(cfg, data=replace(cfg.data, document_attention=apart))
        scores = heldout.score_all(seen, state, named, heldout.Reading(batch, limit=task["limit"]))
        whole = heldout.together(list(scores.values())).loss
        found[how] = {"loss": whole, "kinds": {kind: score.loss for kind, score in scores.items()}}
    return found


def gains(found: list[dict[str, Any]]) -> dict[str, list[tuple[float, dict[str, float]]]]:
    """Of each method, for each seed whose two models are there: loss trained and read joined, less trained and read
    apart; and the same by kind of text."""
    pairs: dict[tuple[str, int], dict[str, Any]] = {}
    for r in found:
        pairs.setdefault((r["kind"], r["seed"]), {})[r["trained"]] = r[r["trained"]]
    made: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for (method, _), both in pairs.items():
        if len(both) == len(HOW):
            joined, apart = both["joined"], both["apart"]
            by_kind = {kind: loss - apart["kinds"][kind] for kind, loss in joined["kinds"].items()}
            made.setdefault(method, []).append((joined["loss"] - apart["loss"], by_kind))
    return made


def report(found: list[dict[str, Any]], size: str, length: int) -> str:
    """Markdown: a row for each trained model, and what training and reading apart gains."""
    lines = [f"# Documents apart or joined, {size}, samples of {length} tokens", ""]
    for command, origin in dict.fromkeys((r["command"], r["origin"]) for r in found):
        lines += [f"`{command}`: {origin}.", ""]
    mean = next((f"{r['document_tokens']:,.0f}" for r in found if r["document_tokens"]), "?")
    lines += [
        f"{found[0]['curve'][-1]['tokens']:,} training tokens; a token's document has {mean} tokens of its sample, in "
        "the mean over tokens.  Losses are those of the held-out text in nats, with the same targets.",
        "",
        "| method | trained | seed | read joined | read apart | seconds of training |",
        "|---|---|---|---|---|---|",
    ]
    for r in found:
        losses = " | ".join(f"{r[how]['loss']:.4f}" for how in HOW)
        lines.append(f"| {r['kind']} | {r['trained']} | {r['seed']} | {losses} | {r['training_seconds']:.0f} |")
    if not (every := gains(found)):
        return "\n".join(lines) + "\n"
    kinds = sorted(found[0]["joined"]["kinds"])
    lines += [
        "",
        "Trained and read joined, less trained and read apart (above 0: apart is better), in the mean over seeds, with "
        "its standard error, and by kind of text:",
        "",
        "| method | seeds | all | " + " | ".join(kinds) + " |",
        "|---" * (3 + len(kinds)) + "|",
    ]
    for method, seeds in every.items():
        values = [value for value, _ in seeds]
        error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
        by_kind = [f"{statistics.mean(by[kind] for _, by in seeds):+.4f}" for kind in kinds]
        cells = [f"{statistics.mean(values):+.4f}{error}", *by_kind]
        lines.append(f"| {method} | {len(values)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


@script
def main(argv: list[str] | None = None) -> None:
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
    options.add_argument("--methods", nargs="+", choices=kinds, default=["vanilla", "loop"], help="rows")
    options.add_argument("--seeds", nargs="+", type=number(0), default=[SEEDS[0]], help="default: %(default)s")
    options.add_argument("--parallel", type=number(1), default=1, metavar="N", help="runs at a time; default: 1")
    options.add_argument("--minutes", type=number(0.1), metavar="M", help="time that there is; default: no limit")
    options.add_argument("--work", type=folder, default=Path("runs/documents"), help="runs; default: %(default)s")
    options.add_argument("--output", type=folder, default=RESULTS, help="results; default: benchmarks/results")
    args = options.parse_args(argv)
    begin, cuda, size = time.monotonic(), torch.cuda.is_available(), SIZES[args.size]
    length, tokens = args.length or size.length, args.tokens or size.tokens
    text = texts.ready(args.corpus, args.bytes, size.vocab - 1, args.work)
    command = typed("documents", argv)
    known = {row.kind.name: row.kind for row in rows(args.size)}
    jobs, files = [], []
    for method in args.methods:
        for seed in args.seeds:
            row = Row(known[method], args.size, seed, 1.0, tokens)
            for how, apart in HOW.items():
                name = f"{args.size}.{length}.{tokens / 1e6:g}M.{row.short}.{how}"
                files.append(args.output / "documents" / f"{name}.json")
                if files[-1].is_file():
                    say(f"{name}: done before.")
                    continue
                made = config(row, text, args.work / name, cuda, length, args.micro_batch, apart)
                told = {"name": name, "kind": method, "seed": seed, "trained": how, "command": command}
                jobs.append(job(told, made, text, files[-1], args.heldout))
    try:
        queue.run_all(jobs, args.parallel, begin, args.minutes, say)
    finally:  # what has ended is told, whatever did not
        if found := [json.loads(path.read_text()) for path in files if path.is_file()]:
            told = report(found, args.size, length)
            short = [{k: r[k] for k in ("kind", "seed", "trained", *HOW)} for r in found]
            write(args.output, f"documents-{args.size}-{length}", short, told)
            say(told)


if __name__ == "__main__":
    sys.exit(main())
