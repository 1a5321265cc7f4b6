"""`megaponder calibrate`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from megaponder.cli.parser import Commands, add_plugin

SUMMARY = "choose when tokens stop early, with a bound on what that costs, and write it into an export"

EPILOG = """\
examples
  megaponder calibrate hf/ada --data data/wiki                       at most 5 % other tokens, with 95 % confidence
  megaponder calibrate hf/ponder --data data/wiki --risk 0.02 --confidence 0.9 --texts 1000
  megaponder calibrate hf/huginn --data data/wiki --by entropy --measure loss --risk 0.01
  megaponder calibrate runs/ada --data data/wiki --json exit.json    of a run: measured, not written

PATH is an export folder, a checkpoint or a run.  Texts are documents of a dataset that `megaponder prepare` wrote with
the model's tokenizer, and that the model was not trained on.  Thresholds are tested from the safest one on, until
one can no longer be shown to keep the bound (Learn then Test, Hoeffding-Bentkus); the last one before it becomes the
export's own, with all that was measured under `confident_exit` in config.json.  generate uses it unless it is given
another --threshold, or --exit-below.  A ponderlm becomes a confident_ponderlm, with the same weights.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("calibrate", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    add_plugin(parser)
    parser.add_argument("path", metavar="PATH", help="export folder, checkpoint or run folder (its newest one)")
    parser.add_argument("--data", required=True, metavar="PREFIX", help="held-out dataset")
    parser.add_argument("--risk", type=float, default=0.05, metavar="R", help="bound on the mean risk (default 0.05)")
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="C", help="with which it holds (default 0.95)"
    )
    parser.add_argument(
        "--measure", default="disagreement", metavar="NAME",
        help="risk of a text: disagreement (share of its tokens whose likeliest successor is another one than at full "
        "depth; default) or loss (nats per token above full depth, from 0 to 1)",
    )  # fmt: skip
    parser.add_argument(
        "--by", metavar="NAME", help="what tells that a token may stop; for looped cores change, cosine, entropy, ..."
    )
    parser.add_argument("--texts", type=int, default=500, metavar="N", help="texts to use (default 500)")
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens of a text; default: a training sequence (export: the longest)"
    )
    parser.add_argument("--grid", nargs="+", type=float, metavar="X", help="thresholds to test, chosen before any data")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="texts at a time (default 16)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of texts (default 0)")
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda; default: cuda if available")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to this file")


def run(args: argparse.Namespace) -> int:
    import torch

    from megaponder import files
    from megaponder.errors import ConfigError, UserError
    from megaponder.export import exits
    from megaponder.inference import calibrate, heldout

    for name in ("texts", "length", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}", value, "it must be at least 1", "use 100 or more")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise UserError(f"--json {args.json}: there is no such folder; make it, or name another file.")
    calibrate.check_numbers(args.risk, args.confidence, args.measure)
    path, exported = Path(args.path), (Path(args.path) / "config.json").is_file()
    if exported:
        exits.refuse_foreign(path)
    cfg, state = heldout.read_model(path)
    [prefix] = heldout.datasets(cfg, [args.data]).values()
    longest, length = cfg.model.max_positions, args.length or cfg.data.sequence_length
    if longest is not None and length > longest:
        raise ConfigError("--length", length, f"the model's longest sequence is {longest}", f"use {longest}")
    texts = calibrate.read_texts(prefix, cfg.data.eod_id, args.texts, length, args.seed)
    cfg, model = calibrate.exiting_model(cfg, state, args.device)
    found, rule = calibrate.of_model(
        cfg, model, texts, by=args.by, grid=args.grid, risk=args.risk, confidence=args.confidence,
        measure=args.measure, length=length, seed=args.seed, batch=args.batch,
        stored=exits.dtype_of(path) if exported else torch.float32,
    )  # fmt: skip
    for t in found.tested:
        depth = "" if t["depth"] is None else f", {t['depth']:.2f} passes"
        print(f"{t['threshold']:>12.6g}: risk {t['risk']:.4f}, p {t['p']:.3g}{depth}")
    print(found)
    if args.json:
        files.write_json(Path(args.json), asdict(found))
    if exported:
        exits.write(path, cfg, asdict(found), str(found), rule.options(found.threshold))
        print(f"{path}: it now stops there, unless it is given another threshold.")
    else:
        print(f"{path} is no export, and nothing was written; calibrate its export for a model that stops there.")
    return 0
