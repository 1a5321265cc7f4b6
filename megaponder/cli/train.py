"""`megaponder train`."""

from __future__ import annotations

import argparse

from megaponder.cli.parser import Commands, add_engine, with_engine
from megaponder.cli.report import report_error
from megaponder.config import launcher
from megaponder.config.resolve import resolve
from megaponder.errors import MACHINE, LostRank, known

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

  With --run write `-m -- megaponder`: torchrun has its own options that start with --run.
  Data-parallel size is what is left: processes / (tensor x context x pipeline).  `megaponder plan` shows a layout.

before a long run
  The same line with --preflight checks ranks, devices, versions, disk, configuration and data of all processes, and
  names those that are missing or different; it takes less than a minute and trains nothing.

stopping
  SIGUSR1 or SIGUSR2 save and end with exit code 75 (restart me), SIGTERM with 143, Ctrl-C with 130, a file
  RUN/STOP with 0.  A lost rank ends the others with 69.  docs/faults.md has the full table.

continuing
  The same command continues the run: it takes the newest complete checkpoint of the run folder, in any layout.
  Every run folder holds config.yaml, the complete configuration; it can be passed as CONFIG.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        help=SUMMARY,
        description="Train a model as described by a configuration file.",
        usage="megaponder train CONFIG [--section.field value ...]",
        epilog=EPILOG,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file; see configs/")
    add_engine(parser)
    parser.add_argument("--fields", action="store_true", help="list every field of the configuration and stop")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="write a profiler trace and a memory snapshot of two steps to RUN/profile; "
        "--logging.profile_steps chooses the steps",
    )
    parser.add_argument("--preflight", action="store_true", help="check every process and its node, then stop")


def run(args: argparse.Namespace) -> int:
    """Load and resolve the configuration; only then import the heavy part, which checks everything again."""
    if args.fields:
        from megaponder.cli.fields import print_fields

        return print_fields()
    from megaponder.cli import configuration
    from megaponder.monitor.start_end import starting
    from megaponder.training import early_signals, exit_code, shortage

    early_signals.listen()
    starting("configuration")

    with exit_code.noted():
        shortage.check_limits()
        exit_code.forget_earlier_attempts(launcher.adopt().rank)
        read = configuration.read(args.config, with_engine(args))
        starting("imports")
        from megaponder.training.job import train

        starting("configuration")
        cfg = resolve(read)
        if args.profile and not cfg.logging.profile_steps:
            cfg.logging.profile_steps = [4, 5]
        if args.preflight:
            from megaponder.training.preflight import preflight

            preflight(cfg)
            return 0
        try:
            code = train(cfg)
        except LostRank as error:
            report_error(str(error))
            exit_code.leave(error.exit_code)
        except MACHINE as error:  # a full disk, above all
            if (problem := known(error)) is None:
                raise
            raise problem from error
        return exit_code.stopped(code)
