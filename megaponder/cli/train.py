"""`megaponder train`."""

from __future__ import annotations

import argparse

from megaponder.cli.parser import Commands

SUMMARY = "train a model, or continue a run from its newest complete checkpoint"
OVERRIDES = True

EPILOG = """\
overrides
  Any field of the configuration can be set on the command line by its dotted name; the command line wins.

    megaponder train configs/llama-125m-ponderlm.yaml --run runs/first \\
        --data.train 0.7 data/pile 0.3 data/code --train.steps 1000 --ponder.options.steps 2

  `megaponder train --fields` lists every field with its meaning, type and default.

many processes
  torchrun --nproc-per-node 8 -m megaponder train CONFIG --parallel.tensor 2 --parallel.pipeline 2

  With --run write `-m -- megaponder`: torchrun has options of its own that begin with --run.
  Data-parallel size is what is left: processes / (tensor x pipeline).  `megaponder plan` shows a layout beforehand.

continuing
  The same command continues the run: it takes the newest complete checkpoint of the run folder, at any layout.
  Every run folder holds config.yaml, the complete configuration; it can be passed as CONFIG.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        help=SUMMARY,
        description="Train a model as a configuration file says.",
        usage="megaponder train CONFIG [--section.field value ...]",
        epilog=EPILOG,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file; see configs/")
    parser.add_argument("--fields", action="store_true", help="list every field of the configuration and stop")


def run(args: argparse.Namespace) -> int:
    """Load and resolve the configuration; only then import the heavy part, which checks it again as a whole."""
    if args.fields:
        from megaponder.cli.fields import print_fields

        return print_fields()
    from megaponder.cli.configuration import load

    cfg = load(args.config, args.overrides)
    from megaponder.training.loop import train

    train(cfg)
    return 0
