"""`megaponder generate`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megaponder.cli.parser import Commands, add_plugin
from megaponder.errors import UserError, first_line

SUMMARY = "continue a text with a checkpoint or an exported folder"

JSON = (".jsonl", ".ndjson", ".json")
"""Files of --batch whose lines are JSON objects."""

EPILOG = """\
examples
  megaponder generate runs/first "The history of"
  megaponder generate hf/first "The history of" --max-tokens 100 --temperature 0.8 --top-p 0.95 --seed 1
  echo "def main(" | megaponder generate runs/first -
  megaponder generate runs/first --batch prompts.jsonl --rows 32 --depths > texts.jsonl
  megaponder generate runs/first "The history of" --passes 2
  megaponder generate runs/first "The history of" --speculate 4
  megaponder generate runs/sft "Name three rivers." --chat

Greedy by default (temperature 0): the same text every time.

--batch reads one prompt a line, also an empty one, or from .jsonl JSON objects with a field "prompt" or "text". It
prints one JSON object a line, in the same order, each as soon as it and those before it are done. Every step runs one
pass of each of --rows texts, whichever pass that is.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("generate", help=SUMMARY, description=SUMMARY, epilog=EPILOG)
    add_plugin(parser)
    parser.add_argument("model", metavar="MODEL", help="run folder, checkpoint folder or exported Hugging Face folder")
    prompts = parser.add_argument(
        "prompts",
        nargs="+",
        metavar="PROMPT",
        help="text to continue, empty for a new document; - reads standard input",
    )

    class Batch(argparse.Action):
        """A file of prompts, which are then not wanted as arguments."""

        def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
            namespace.batch, prompts.required = values, False

    parser.add_argument(
        "--batch", action=Batch, metavar="FILE", help="prompts from a file, batched by depth; prints JSON lines"
    )
    parser.add_argument("--rows", type=int, metavar="N", help="texts at once with --batch (default 32)")
    parser.add_argument(
        "--passes", type=int, metavar="N", help="passes of a token, at most (exactly, for methods of fixed depth)"
    )
    parser.add_argument(
        "--threshold", type=float, metavar="X",
        help="of halting, from 0 to 1, instead of the model's own (ponder.options.threshold): the lower, the deeper "
        "tokens go (adaponderlm, adaptive_cot; 0: all passes), or the higher (ouro, confident_ponderlm; 1: all passes)",
    )  # fmt: skip
    parser.add_argument(
        "--exit-below", type=float, metavar="X", help="looped cores stop once a recurrence changes less than this"
    )
    parser.add_argument(
        "--exit-by", metavar="NAME", help="measure of that: change, cosine, entropy, divergence, ... (docs/looped.md)"
    )
    parser.add_argument(
        "--kv-budget", type=int, metavar="N", help="keep keys and values of so many passes of a token; 0: of all"
    )
    parser.add_argument(
        "--depths", action="store_true",
        help="tell how many passes each token of prompt and text ran; the last one, which nothing has read, has none",
    )  # fmt: skip
    parser.add_argument(
        "--speculate", type=int, metavar="N",
        help="draft N tokens a round by their first pass, which the later ones verify: the greedy text is the same as "
        "without, at the depth that --passes and --threshold say",
    )  # fmt: skip
    parser.add_argument(
        "--chat", action="store_true",
        help="the prompt is a user's message, or a list of messages as JSON; prints the answer alone",
    )  # fmt: skip
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

    if args.batch is not None:
        if args.prompts:
            raise UserError(f"--batch {args.batch}: its prompts are the file's; leave out {args.prompts[0]!r}.")
        return _batch(args)
    if args.rows is not None:
        raise UserError(f"--rows {args.rows}: it belongs to --batch; prompts given as arguments all run at once.")
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
        passes=args.passes,
        threshold=args.threshold,
        exit_below=args.exit_below,
        exit_by=args.exit_by,
        kv_budget=args.kv_budget,
        depths=args.depths,
        speculate=args.speculate,
        chat=args.chat,
    )
    for i, text in enumerate(texts):
        if i:
            print("---")
        print(text.text if args.chat else text.prompt + text.text)
        if text.depths:
            print(f"depths: {' '.join(map(str, text.depths))} (mean {sum(text.depths) / len(text.depths):.2f})")
        if text.rounds:
            print(f"{text.tokens} tokens in {text.rounds} rounds: {text.tokens / text.rounds:.2f} a round")
    return 0


def _batch(args: argparse.Namespace) -> int:
    """One JSON object a line: prompt, text, tokens, ended, and depths on request."""
    from megaponder.inference.generate import Generation, generate

    if args.no_cache or args.speculate is not None:
        raise UserError(f"--batch excludes {'--no-cache' if args.no_cache else '--speculate'}; leave one out.")

    def show(text: Generation) -> None:
        row = {"prompt": text.prompt, "text": text.text, "tokens": text.tokens, "ended": text.ended}
        told = row if text.depths is None else {**row, "depths": text.depths}
        print(json.dumps(told, ensure_ascii=False), flush=True)

    generate(
        args.model,
        _prompts(Path(args.batch)),
        max_new_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        tokenizer=args.tokenizer,
        device=args.device,
        trust_remote_code=args.trust_remote_code,
        passes=args.passes,
        threshold=args.threshold,
        exit_below=args.exit_below,
        exit_by=args.exit_by,
        kv_budget=args.kv_budget,
        depths=args.depths,
        rows=32 if args.rows is None else args.rows,
        on_text=show,
        chat=args.chat,
    )
    return 0


def _prompts(path: Path) -> list[str]:
    """The prompts of a file: a line each, or the field "prompt" or "text" of JSON lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # ends of lines become \n
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--batch {path}: it cannot be read ({first_line(error)}).") from None
    lines = text.removesuffix("\n").split("\n") if text else []  # splitlines also splits at characters of a text
    if not lines:
        raise UserError(f"--batch {path}: it is empty; write one prompt a line.")
    if path.suffix.lower() not in JSON:
        return lines
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompts.append(row.get("prompt", row.get("text")))
        except (ValueError, AttributeError, RecursionError):
            prompts.append(None)
        if not isinstance(prompts[-1], str):
            raise UserError(f'{path}, line {number}: it must be a JSON object with a text "prompt" or "text".')
    return prompts
