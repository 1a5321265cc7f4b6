"""`megaponder branch`."""

from __future__ import annotations

import argparse

from megaponder.cli.parser import Commands

SUMMARY = "start a new run from a checkpoint of another one, for a cooldown or with other settings"
OVERRIDES = True

EPILOG = """\
examples
  megaponder branch runs/long 2000 --out runs/cool-2000 --cooldown 200
  megaponder train runs/cool-2000/config.yaml

  megaponder branch runs/long 2000 --out runs/hot --optimizer.lr 1e-3 --train.steps 4000

The branch has the weights, the optimizer state and the place in the data of that step, so its next step is the one that
the run would have taken.  --cooldown N lets the learning rate fall linearly from what it is there to 0 over N steps,
which end the budget, so no schedule and no budget may be given beside it; a run with schedule.kind: constant thus gives
finished models of many lengths.  Other fields may be set as in `megaponder train`, where a run that continues may
change them.  Checkpoints are linked, not copied, where the file system can, and stay when the old run is deleted.
checkpoint.keep_every keeps the steps to branch from.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "branch",
        help=SUMMARY,
        description=SUMMARY,
        usage="megaponder branch RUN STEP --out NEWRUN [--cooldown N] [--section.field value ...]",
        epilog=EPILOG,
    )
    parser.add_argument("source", metavar="RUN", help="run folder")
    parser.add_argument("step", metavar="STEP", help="step of one of its checkpoints")
    parser.add_argument("--out", metavar="NEWRUN", required=True, help="run folder to write")
    parser.add_argument(
        "--cooldown", type=int, metavar="N", help="end after N steps in which the learning rate falls linearly to 0"
    )


def run(args: argparse.Namespace) -> int:
    from megaponder.training.branch import branch

    print(branch(args.source, args.step, args.out, args.cooldown, args.overrides))
    return 0
