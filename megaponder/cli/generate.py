"""`megaponder generate`."""

from __future__ import annotations

import argparse
import sys

from megaponder.cli.parser import Commands, add_plugin

SUMMARY = "continue a text with a checkpoint or an exported folder"

EPILOG = """\
examples
  megaponder generate runs/first "The history of"
  megaponder generate hf/first "The history of" --max-tokens 100 --temperature 0.8 --top-p 0.95 --seed 1
  echo "def main(" | megaponder generate runs/first -

Greedy by default (temperature 0): the same text every time.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("generate", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    add_plugin(parser)
    parser.add_argument("model", metavar="MODEL", help="run folder, checkpoint folder or exported Hugging Face folder")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to continue; - reads standard input")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="new tokens (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling; 1: keep everything (default)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K best tokens; 0: keep everything (default)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed for sampling (default 0)")
    parser.add_argument("--tokenizer", metavar="PATH", help="default: the model's own")
    parser.add_argument("--no-cache", action="store_true", help="recompute every pass for every token (for checking)")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run an exported folder's modelling code whatever its version"
    )
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda; default: cuda if available")


def run(args: argparse.Namespace) -> int:
    """Print each prompt with its continuation."""
    from megaponder.inference.generate import generate

    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]
    texts = generate(
        args.model,
        prompts,
        max_new_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        tokenizer=args.tokenizer,
        device=args.device,
        use_cache=not args.no_cache,
        trust_remote_code=args.trust_remote_code,
    )
    for i, text in enumerate(texts):
        if i:
            print("---")
        print(text.prompt + text.text)
    return 0
