"""`megaponder replay`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaponder.cli.parser import Commands

SUMMARY = "write a run's metrics.jsonl into TensorBoard or Weights & Biases"

EPILOG = """\
examples
  megaponder replay runs/first --tensorboard          the curves as they are in metrics.jsonl; older events are hidden
  megaponder replay runs/first --wandb offline        for a run that was trained with logging.wandb off

metrics.jsonl is the record: it has every row once, despite interruptions.  Weights & Biases gets the run's own id; a
run that has logged there before would show its rows twice, so --id can name another.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("replay", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--tensorboard", action="store_true", help="write events to RUN/tensorboard")
    parser.add_argument("--wandb", choices=("offline", "online"), help="log a Weights & Biases run")
    parser.add_argument("--id", help="for --wandb: id of the run there (default: the run folder's own)")


def run(args: argparse.Namespace) -> int:
    from megaponder.errors import UserError
    from megaponder.monitor import replay

    if not args.tensorboard and args.wandb is None:
        raise UserError("megaponder replay: no tracker was chosen; add --tensorboard or --wandb offline.")
    for sentence in replay.replay(Path(args.run), args.tensorboard, args.wandb, args.id):
        print(sentence)
    return 0
