"""`megaponder import`."""

from __future__ import annotations

import argparse

from megaponder.cli.parser import Commands, add_plugin
from megaponder.export.public_code import METHODS

SUMMARY = "convert a Hugging Face folder to a checkpoint to start from"

EPILOG = """\
examples
  megaponder import hf/pythia-410m runs/pythia-410m
  megaponder train configs/pythia-410m-ponderlm.yaml --checkpoint.load runs/pythia-410m

Folders of GPT-NeoX (Pythia), GPT-2, Llama, Mistral, Qwen2, Qwen3, OLMo2 and OPT, those of Ouro, Huginn and Nanbeige,
and this project's own exports are read, from safetensors only, and load in any layout.  The logits of both models are
compared before anything is written.
OUT/config.yaml starts a training from the import: megaponder train OUT/config.yaml --data.train DATA --train.tokens N

Folders that the public code of PonderLM and PonderLM-2 saved become models of the method that trained them.  The
config.json of PonderLM-2 does not say which one that was: --method does.

  megaponder import hf/PonderLM-2-Pythia-410m runs/ponderlm2 --method ponderlm2

A retrofit repeats a few layers of a pretrained model and leaves others out (docs/looped.md):

  megaponder import hf/TinyLlama-1.1B runs/tinyllama-16 --layers 0-3,10-21
  megaponder train configs/tinyllama-1.1b-retrofit.yaml --checkpoint.load runs/tinyllama-16
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("import", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    add_plugin(parser)
    parser.add_argument("source", metavar="FOLDER", help="Hugging Face folder with config.json and safetensors")
    parser.add_argument("out", metavar="OUT", help="run folder to write; it gets one checkpoint, of step 0")
    parser.add_argument(
        "--ignore", nargs="+", default=[], metavar="FIELD",
        help="fields of config.json to leave out, of those that are known to be without effect",
    )  # fmt: skip
    parser.add_argument(
        "--method", choices=METHODS, metavar="NAME",
        help=f"what trained a folder of PonderLM-2's code: {', '.join(METHODS)}",
    )  # fmt: skip
    parser.add_argument(
        "--layers", metavar="LAYERS", help="keep only these layers, such as 0-3,10-21 (from 0); the others are left out"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, metavar="X",
        help="largest difference of logits, as a fraction of the largest logit (default 1e-4)",
    )  # fmt: skip
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the folder's modelling code whatever its version"
    )


def run(args: argparse.Namespace) -> int:
    from megaponder.export.from_hf import import_hf

    print(
        import_hf(
            args.source,
            args.out,
            ignore=args.ignore,
            force=args.force,
            tolerance=args.tolerance,
            trust_remote_code=args.trust_remote_code,
            method=args.method,
            only=args.layers,
        )
    )
    return 0
