"""`megaponder COMMAND ...`: finds the command's module, runs it, turns a user's mistake into one line and exit code 2.

A command is a module of this package, named as the command (import_ where Python reserves the word), with

    SUMMARY: str                                     one line for `megaponder --help`
    add_parser(commands: Commands) -> None           its options and teaching help, by `commands.add_parser(...)`
    run(args: argparse.Namespace) -> int             the work; heavy imports belong here; returns the exit code

and OVERRIDES = True if it takes `--section.field value` of a configuration: they arrive as `args.overrides`.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

from megaponder import __version__
from megaponder.cli.parser import Parser
from megaponder.cli.report import ended
from megaponder.config.declare import RenamedField
from megaponder.config.fields import sections
from megaponder.errors import UserError

COMMANDS = (
    "demo", "prepare", "plan", "train", "branch", "average", "upcycle", "watch", "replay", "eval", "compare",
    "generate", "inspect", "lineage", "export", "calibrate", "import",
)  # fmt: skip
"""In the order in which a newcomer needs them."""

EPILOG = """\
first steps
  megaponder demo                                          a small pondering model, trained on this machine
  megaponder prepare --help                                convert text to an indexed dataset
  megaponder plan configs/pythia-410m-ponderlm.yaml        what a run would need
  megaponder train configs/pythia-410m-ponderlm.yaml --data.train data/pile
  torchrun --nproc-per-node 8 -m megaponder train ...      the same on eight processes

A mistake in a command or configuration ends with one sentence and exit code 2.
"""


def _module(command: str) -> ModuleType:
    return import_module(f"megaponder.cli.{'import_' if command == 'import' else command}")


def build_parser(only: str | None = None) -> Parser:
    """The parser of all commands, or of one (then the others are not imported)."""
    parser = Parser(
        prog="megaponder",
        description="Pretraining of pondering language models on megatron-core.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"megaponder {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name in (only,) if only else COMMANDS:
        _module(name).add_parser(commands)
    return parser


def parse(words: list[str]) -> tuple[argparse.Namespace, ModuleType | None]:
    """Arguments and the module of their command (None: no command was given)."""
    command = next((w for w in words if not w.startswith("-")), None)
    parser = build_parser(command if command in COMMANDS else None)
    args, rest = parser.parse_known_args(words)
    if args.command is None:
        if rest:
            parser.refuse_unknown(rest)
        parser.print_help()
        return args, None
    module = _module(args.command)
    _refuse_empty(args)
    if getattr(module, "OVERRIDES", False):
        command_parser = parser.command_parser(args.command)
        command_parser.refuse_value_of_switch(words, rest)
        for word in rest:  # a field has a dot; anything else was meant for the command itself
            name = word.partition("=")[0]
            if name.startswith("--") and "." not in name and name[2:] not in ("run", *sections()):
                command_parser.refuse_unknown([word])
        args.overrides = rest
    elif rest:
        parser.command_parser(args.command).refuse_unknown(rest)
    return args, module


def _refuse_empty(args: argparse.Namespace) -> None:
    """Rejects an empty path, as from an unset shell variable, which would mean the current folder."""
    for name, value in vars(args).items():
        if name != "prompts" and ("" in value if isinstance(value, list) else value == ""):
            raise UserError(f"megaponder {args.command}: {name.upper()} is empty; is a shell variable unset?")


_with_source_line = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning about the user's own configuration is one sentence, without the line of code that gave it."""
    if issubclass(category, RenamedField):
        return f"Warning: {message}\n"
    return _with_source_line(message, category, filename, lineno, line)


def keep_console_clean() -> None:
    """Suppress libraries' messages about themselves, which users of a command cannot act on."""
    warnings.formatwarning = _format_warning
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # its deprecations, and missing GPU libraries
    if not sys.stderr.isatty():  # transformers draws a bar while it loads weights; read when tqdm is imported
        os.environ.setdefault("TQDM_DISABLE", "1")


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code: those of `megaponder.errors`."""
    words = sys.argv[1:] if argv is None else argv
    keep_console_clean()

    def work() -> Any:
        args, module = parse(words)
        if getattr(args, "plugin", None) is not None:
            from megaponder.ponder.plugins import load_plugin

            load_plugin(args.plugin)
        return module.run(args) if module is not None else 0

    return ended(work)


def command() -> None:
    """`megaponder`: `main` as a program.

    A process that ends early leaves its process groups in use; their threads can abort an orderly exit.  One that has
    trained has closed everything that is its own; taking apart PyTorch and CUDA would only take time.
    """
    code = main()
    distributed = sys.modules.get("torch.distributed")
    unfinished = code and distributed is not None and distributed.is_initialized()
    if unfinished or "megaponder.training.loop" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    command()
