"""`megaponder eval`."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaponder.cli.parser import Commands

if TYPE_CHECKING:
    from megaponder.inference.heldout import Score

SUMMARY = "loss, perplexity and bits per byte of a checkpoint or an export on held-out text"
SAMPLE = 65_536

EPILOG = """\
examples
  megaponder eval runs/first                                      the data.valid of the run (a split needs --data)
  megaponder eval hf/first --data wiki=data/wiki books=data/books an export, two datasets, and both together
  megaponder eval runs/ada --data data/wiki --thresholds 0.1 0.5  the same weights at other thresholds
  megaponder eval runs/first --data data/wiki --passes 1 2 3 4 --json table.json
  megaponder eval runs/ada --data data/wiki --depth               who gets the passes and what they bring; for compare
  megaponder eval hf/first --tasks lambada_openai piqa            tasks of lm-eval (extra megaponder[eval])

PATH is a checkpoint, a run folder (its newest one), or a Hugging Face folder.  A dataset is one that `megaponder
prepare` wrote with the model's tokenizer; all of it is read, and every token that counts in the loss is a target once.
Losses are in nats per token, computed in FP32 in one process.  FLOPs are those of a token in decoding, at the depth
that it had.  A method that weighs in training what decoding leaves out (ponderlm3) is evaluated as decoding runs it;
its weighed loss stands beside that one.

--depth also measures, on a part of the text, the same weights at other depths and thresholds, the loss after each
pass, whether the gates' scores predict what a pass brings, and whether the model's choice of tokens beats the same
depths shuffled over them.  For a run it writes all numbers to RUN/eval.json, which `megaponder compare` reads.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("eval", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    parser.add_argument("path", metavar="PATH", help="checkpoint, run folder or export folder")
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=PREFIX", help="held-out datasets")
    parser.add_argument(
        "--thresholds", nargs="+", type=float, default=[], metavar="X",
        help="also with these halting thresholds (ponderlm: exit once the best next token is that likely; with a "
        "budget: the least score of a token that goes on, of any sign, as --depth shows)",
    )  # fmt: skip
    parser.add_argument(
        "--passes", nargs="+", type=int, default=[], metavar="N",
        help="also with at most so many passes a token (with a budget: exactly as many, whatever its scores are)",
    )  # fmt: skip
    parser.add_argument(
        "--depth", action="store_true", help="also sweep depths and thresholds, and measure what each pass brings"
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=SAMPLE,
        metavar="N",
        help=f"targets for --depth, whatever --limit says (default {SAMPLE:,})",
    )
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights (optimizer.ema_decay)")
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens in a window; default: as in training (an export: the longest)"
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="only the first N targets of each dataset, examples of each task; "
        "it does not bound --depth, which --sample does",
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="windows at a time (default 8)")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="tasks of lm-eval")
    parser.add_argument("--tasks-folder", metavar="FOLDER", help="with definitions of more tasks (lm-eval's YAML)")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="for --tasks: run the modelling file whatever its version"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to this file")


def run(args: argparse.Namespace) -> int:
    from megaponder.errors import ConfigError, UserError
    from megaponder.inference import evaluation, heldout, variants

    for name in ("length", "limit", "batch", "sample"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}", value, "it must be at least 1", "use 1 or more")
    saved = _place(args)
    tasks = {}
    if args.tasks and args.ema:
        raise UserError("--tasks: it reads no moving average; make a run of it with megaponder average --ema first.")
    if args.tasks:
        from megaponder.inference.tasks import evaluate

        trusted, limit = args.trust_remote_code, args.limit
        tasks = evaluate(args.path, args.tasks, args.batch, trusted, args.tasks_folder, limit)
        for task, values in tasks.items():
            print(f"{task}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
        if not args.data and not args.depth:
            _write_json(saved, {"path": args.path, "tasks": tasks})
            return 0
    cfg, state = heldout.read_model(args.path, args.ema)
    longest = None if cfg.model.freqkv else cfg.model.max_positions
    if args.length is not None and longest is not None and args.length > longest:
        raise ConfigError("--length", args.length, f"the model's longest sequence is {longest}", f"use {longest}")
    named = heldout.datasets(cfg, args.data)
    made = variants.asked(cfg, state, args.thresholds, args.passes)
    reading = heldout.Reading(args.batch, args.length, args.limit)
    found = [(label, heldout.score_all(changed, weights, named, reading)) for label, changed, weights in made]
    for line in table(found):
        print(line)
    length = args.length or cfg.data.sequence_length
    print(f"Windows of {length:,} tokens, each read by itself.")
    told = evaluation.results_of(args.path, cfg, found, length) | ({"tasks": tasks} if tasks else {})
    if args.depth:
        sample = evaluation.sample(named, args.sample)
        told |= evaluation.by_depth(cfg, state, sample, args.batch, args.length)
        for line in by_depth(told):
            print(line)
    _write_json(saved, told)
    return 0


def _place(args: argparse.Namespace) -> Path | None:
    """The file for all numbers, if any; UserError before any work where it cannot be written."""
    from megaponder.errors import UserError
    from megaponder.inference import evaluation

    if args.json:
        path = Path(args.json)
    elif args.depth and not args.ema and (Path(args.path) / "config.yaml").is_file():
        path = Path(args.path) / evaluation.NAME
    else:
        return None
    if path.is_dir():
        raise UserError(f"--json {path}: this is a folder; name a file.")
    if not path.parent.is_dir():
        raise UserError(f"--json {path}: there is no folder {path.parent}; make it, or name another file.")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path}: you may not write into {path.parent}; name another file with --json.")
    return path


def _write_json(path: Path | None, told: dict[str, Any]) -> None:
    from megaponder import files

    if path is not None:
        files.write_json(path, told)
        print(f"{path}: all numbers.")


def table(found: Sequence[tuple[str, dict[str, Score]]]) -> Iterator[str]:
    """The results as a Markdown table; several datasets have a row together."""
    from megaponder.inference.heldout import together

    rows = [["", "data", "loss", "soft loss", "perplexity", "bits/byte", "depth", "GFLOPs/token"]]
    for label, scores in found:
        every = [*scores.items()]
        if len(scores) > 1:
            every.append(("all together" if "together" in scores else "together", together(list(scores.values()))))
        for name, score in every:
            stats = score.stats
            rows.append([
                label, name, f"{score.loss:.4f}", _number(stats.get("soft_loss")), f"{score.perplexity:.4g}",
                _number(score.bits_per_byte), _number(stats.get("mean_depth"), 2), f"{score.flops / 1e9:.4g}",
            ])  # fmt: skip
    yield from _aligned(rows, 2)


def by_depth(told: Mapping[str, Any]) -> Iterator[str]:
    """The part about depth as Markdown tables: the sweep, the passes, the policy."""
    from megaponder.inference.sweep import BY_SCORE

    analysis, prefixes = told["analysis"], told["sample"]["prefixes"]
    of = f" of {len(prefixes)} datasets, at most {told['sample']['targets']:,} of each" if len(prefixes) > 1 else ""
    yield f"\nThe same weights at other depths, on {analysis['targets']:,} targets{of}:\n"
    rows = [["", "loss", "depth", "GFLOPs/token"]]
    for p in sorted(told["sweep"], key=lambda p: p.get("threshold", -math.inf)):
        rows.append([p["variant"], _number(p["loss"]), _number(p["depth"], 2), f"{p['flops_per_token'] / 1e9:.4g}"])
    yield from _aligned(rows, 1)
    if any(p["variant"].startswith(BY_SCORE) for p in told["sweep"]):
        sure = told["method"] == "confident_ponderlm"
        what = "1 less the probability of the likeliest token"
        what = what if sure else "the predicted gain of one more pass over the gains' root mean square, of any sign"
        yield f"\nA token goes on while its score ({what}) is at least the threshold."
    if len(analysis["losses"]) > 1:
        yield f"\nWhat one more pass brings (nats per token, on {analysis['targets']:,} targets), and what choosing"
        yield "half of the tokens for it gains:\n"
        rows = [["passes", "loss", "next pass", "rank correlation", "by score", "at random", "in hindsight"]]
        decisions = {d["after"]: d for d in analysis["decisions"]}
        for k, loss in enumerate(analysis["losses"], 1):
            d = decisions.get(k, {})
            half: Mapping[str, float] = next((g for g in d.get("gain", []) if g["share"] == 0.5), {})
            gains = [_number(half.get(name)) for name in ("score", "random", "hindsight")]
            correlation = _number(d.get("rank_correlation"), 3)
            rows.append([str(k), _number(loss), _number(d.get("benefit")), correlation, *gains])
        yield from _aligned(rows, 0)
    for name in ("shuffled", "uniform"):
        if found := analysis.get("policy", {}).get(name):
            words = {"shuffled": "The same depths on other tokens", "uniform": "The mean depth for all tokens"}[name]
            error = found["standard_error"]
            spread = "" if error is None else f" ± {error:.4f}"
            yield f"{words}: {found['loss']:.4f}, {found['minus_policy']:+.4f}{spread} against the model's own choice."


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _aligned(rows: Sequence[Sequence[str]], words: int) -> Iterator[str]:
    """A Markdown table without its empty columns; the first `words` columns are text."""
    from megaponder.compare.table import Table, markdown

    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    yield from markdown(Table("", [[row[i] for i in kept] for row in rows], sum(i < words for i in kept))).splitlines()
