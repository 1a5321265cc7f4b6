"""`megaponder average`."""

from __future__ import annotations

import argparse

from megaponder.cli.parser import Commands, add_plugin

SUMMARY = "average a run's last checkpoints, or take its moving average, as a model of its own"

EPILOG = """\
examples
  megaponder average runs/first --last 5 --out runs/first-mean
  megaponder average runs/first --ema --out runs/first-ema
  megaponder eval runs/first-mean --data data/wiki

The mean of the FP32 weights of the newest checkpoints, or the moving average that optimizer.ema_decay keeps.  OUT is a
run with one checkpoint without optimizer state, in FP32: eval, generate and export read it, and OUT/config.yaml starts
a training from it.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("average", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    add_plugin(parser)
    parser.add_argument("source", metavar="RUN", help="run folder (with --ema also a checkpoint)")
    parser.add_argument("--last", type=int, metavar="N", help="the mean of the N newest checkpoints")
    parser.add_argument("--ema", action="store_true", help="the moving average in the newest checkpoint")
    parser.add_argument("--out", metavar="OUT", required=True, help="run folder to write")


def run(args: argparse.Namespace) -> int:
    from megaponder.export.average import average

    print(average(args.source, args.out, args.last, args.ema))
    return 0
