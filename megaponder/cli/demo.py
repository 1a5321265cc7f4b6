"""`megaponder demo`."""

from __future__ import annotations

import argparse

from megaponder.cli.parser import Commands

SUMMARY = "the whole workflow in small: data, training, resume, export and text, on this machine's CPU"

EPILOG = """\
What happens, in a few minutes on two cores and without any download:
  1. the Python standard library's sources and docstrings become two corpora
  2. a tokenizer is trained on them, and an indexed dataset is written for each
  3. a small PonderLM and a vanilla twin are trained, stopped and resumed
  4. both validation curves are plotted
  5. the model is exported to a Hugging Face folder, its logits are checked, and it writes some text
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("demo", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    parser.add_argument("--out", default="demo-run", metavar="FOLDER", help="output folder (default demo-run)")
    parser.add_argument(
        "--quick", action="store_true", help="a dozen steps: checks that everything works, not what is learnt"
    )


def run(args: argparse.Namespace) -> int:
    from megaponder.demo.run import run_demo

    return run_demo(args.out, quick=args.quick)
