"""`megaponder eval`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaponder.cli.parser import Commands

if TYPE_CHECKING:
    from megaponder.config.schema import RunConfig
    from megaponder.inference.heldout import Score

SUMMARY = "loss, perplexity and bits per byte of a checkpoint or an export on held-out text"

EPILOG = """\
examples
  megaponder eval runs/first                                      the data.valid of the run
  megaponder eval hf/first --data wiki=data/wiki books=data/books an export, two datasets, and both together
  megaponder eval runs/ada --data data/wiki --thresholds 0.1 0.5  the same weights, halting earlier
  megaponder eval runs/first --data data/wiki --passes 1 2 3 4 --json table.json
  megaponder eval hf/first --tasks lambada_openai piqa            tasks of lm-eval (extra megaponder[eval])

PATH is a checkpoint, a run folder (its newest one), or a Hugging Face folder.  A dataset is one that `megaponder
prepare` wrote with the model's tokenizer; all of it is read, and every token that counts in the loss is a target once.
Losses are in nats per token, computed in FP32 in one process.  FLOPs are those of a token in decoding, at the depth
that it had.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("eval", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    parser.add_argument("path", metavar="PATH", help="checkpoint, run folder or export folder")
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=PREFIX", help="held-out datasets")
    parser.add_argument(
        "--thresholds", nargs="+", type=float, default=[], metavar="X",
        help="also with these halting thresholds (ponderlm: exit once the best next token is that likely)",
    )  # fmt: skip
    parser.add_argument(
        "--passes", nargs="+", type=int, default=[], metavar="N", help="also with at most so many passes a token"
    )
    parser.add_argument("--length", type=int, metavar="N", help="tokens in a window; default: data.sequence_length")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N targets of each dataset")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="windows at a time (default 8)")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="tasks of lm-eval, on an export folder")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="for --tasks: run the modelling file whatever its version"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to this file")


def run(args: argparse.Namespace) -> int:
    from megaponder.errors import ConfigError
    from megaponder.inference import heldout, variants

    for name in ("length", "limit", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}", value, "it must be at least 1", "use 1 or more")
    tasks = {}
    if args.tasks:
        from megaponder.inference.tasks import evaluate

        tasks = evaluate(Path(args.path), args.tasks, args.batch, args.trust_remote_code)
        for task, values in tasks.items():
            print(f"{task}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
        if not args.data:
            _write_json(args, {"path": args.path, "tasks": tasks})
            return 0
    cfg, state = heldout.read_model(args.path)
    longest = cfg.model.max_positions
    if args.length is not None and longest is not None and args.length > longest:
        raise ConfigError("--length", args.length, f"the model's longest sequence is {longest}", f"use {longest}")
    named = heldout.datasets(cfg, args.data)
    made = variants.asked(cfg, args.thresholds, args.passes)
    found = [
        (label, heldout.score_all(changed, state, named, args.batch, args.length, args.limit))
        for label, changed in made
    ]
    for line in table(found):
        print(line)
    told = _told(args.path, cfg, found)
    _write_json(args, {**told, "tasks": tasks} if tasks else told)
    return 0


def _write_json(args: argparse.Namespace, told: dict[str, Any]) -> None:
    from megaponder import files

    if args.json:
        files.write_json(Path(args.json), told)


def table(found: Sequence[tuple[str, dict[str, Score]]]) -> Iterator[str]:
    """The results as a Markdown table; several datasets have a row together."""
    from megaponder.inference.heldout import together

    rows = [["", "data", "loss", "perplexity", "bits/byte", "depth", "GFLOPs/token"]]
    for label, scores in found:
        every = dict(scores)
        if len(scores) > 1:
            every["together"] = together(list(scores.values()))
        for name, score in every.items():
            depth, bits = score.stats.get("mean_depth"), score.bits_per_byte
            rows.append([
                label, name, f"{score.loss:.4f}", f"{score.perplexity:.4g}", "" if bits is None else f"{bits:.4f}",
                "" if depth is None else f"{depth:.2f}", f"{score.flops / 1e9:.4g}",
            ])  # fmt: skip
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    widths = [max(len(row[i]) for row in rows) for i in kept]
    for n, row in enumerate(rows):
        cells = [row[i].ljust(w) if i < 2 else row[i].rjust(w) for i, w in zip(kept, widths, strict=True)]
        yield f"| {' | '.join(cells)} |"
        if n == 0:
            marks = ("-" * (w + 1) + (":" if i > 1 else "-") for i, w in zip(kept, widths, strict=True))
            yield f"|{'|'.join(marks)}|"


def _told(source: str, cfg: RunConfig, found: Sequence[tuple[str, dict[str, Score]]]) -> dict[str, Any]:
    """All numbers, for a file."""
    from megaponder.inference.heldout import together

    results: list[dict[str, Any]] = [
        {
            "variant": label,
            "data": {name: score.values() for name, score in scores.items()},
            "together": together(list(scores.values())).values(),
        }
        for label, scores in found
    ]
    return {"path": source, "method": cfg.ponder.method, "options": cfg.ponder.options, "results": results}
