"""argparse with this project's conventions: no abbreviations, help that keeps its layout, one-sentence errors."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from typing import Any, NoReturn

from megaponder.config.fields import all_fields, nearest
from megaponder.errors import UserError

Commands = Any
"""What `add_subparsers` returns (argparse keeps the type private)."""


def _sentence(name: str, action: argparse.Action, word: str | None) -> str:
    """What is wrong with an option's value (None: it is missing), and the nearest legal one."""
    choices = [str(c) for c in action.choices or ()]
    listed = ", ".join(choices)
    if word is None:
        return f"{name}: it needs a value; {f'choose from {listed}' if choices else f'write {name} {action.metavar}'}"
    if action.nargs == 0:
        return f"{name} = {word}: it takes no value; its meaning: {action.help}"
    if choices:
        several = sum(choice.startswith(word) for choice in choices) > 1  # a beginning: no one of them is meant
        close = None if several else nearest(word, choices)
        fix = f"did you mean {close}" if close else f"choose from {listed}"
        return f"{name} = {word}: there is no such choice; {fix}"
    whole = getattr(action.type, "__name__", "") == "int"  # int itself, or a range of it
    kind = "an integer" if whole else "a number"
    fix = "omit it" if action.default is None else f"the default is {action.default}"
    fix = "give one" if action.required else fix
    with contextlib.suppress(ValueError, OverflowError):
        fix = f"the nearest is {round(float(word))}" if whole else fix
    return f"{name} = {word}: it must be {kind}; {fix}"


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that leaves room for the longest command, which argparse counts without its indentation."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            longest = max(map(len, action.choices), default=0) + self._current_indent + self._indent_increment
            self._action_max_length = max(self._action_max_length, longest)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are UserErrors."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", Help)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """A UserError instead of usage and exit."""
        raise UserError(f"{self.prog}: {message} (see {self.prog} --help).")

    def refuse(self, action: argparse.Action, word: str | None) -> NoReturn:
        """A UserError for an option's value (None: there is none)."""
        self.error(_sentence(argparse._get_action_name(action) or "", action, word))

    # argparse calls these with the option and the word; its own messages are not structured

    def _get_value(self, action: argparse.Action, word: str) -> Any:
        try:
            return super()._get_value(action, word)
        except argparse.ArgumentError as error:
            if isinstance(error.__context__, argparse.ArgumentTypeError):  # the type has its own sentence
                self.error(f"{argparse._get_action_name(action)}: {error.__context__}")
            self.refuse(action, word)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self.refuse(action, str(value))

    def _match_argument(self, action: argparse.Action, pattern: str) -> int:
        try:
            return super()._match_argument(action, pattern)
        except argparse.ArgumentError:
            self.refuse(action, None)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but a switch with a value (--profile=3) is refused in this parser's words."""
        args = sys.argv[1:] if args is None else list(args)
        for word in itertools.takewhile(lambda word: word != "--", args):
            option, equals, value = word.partition("=")
            action = self._option_string_actions.get(option)
            if equals and action is not None and action.nargs == 0:
                self.refuse(action, value)
        return super().parse_known_args(args, namespace)

    def refuse_value_of_switch(self, words: list[str], unknown: list[str]) -> None:
        """A UserError for a switch (--profile) followed by a word that nothing takes."""
        for option, word in itertools.pairwise(words):
            action = self._option_string_actions.get(option)
            if action is not None and action.nargs == 0 and word in unknown and not word.startswith("-"):
                self.refuse(action, word)

    def refuse_unknown(self, words: list[str]) -> NoReturn:
        """Name the first word that no option takes, and the nearest option."""
        word = next((w for w in words if w.startswith("-")), words[0]).partition("=")[0]
        fields = all_fields() if "--section" in (self.usage or "") else ()
        field = nearest(word.lstrip("-"), fields, 0.7)
        # a very similar option, otherwise a field, otherwise a somewhat similar option
        close = nearest(word, self._option_string_actions, 0.75) or (f"--{field}" if field else None)
        close = close or nearest(word, self._option_string_actions)
        fix = f"did you mean {close}" if close else f"see {self.prog} --help"
        raise UserError(f"{self.prog}: unknown argument {word}; {fix}.")

    def command_parser(self, command: str) -> Parser:
        """The parser of a command."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices[command]
        raise KeyError(command)


def add_plugin(parser: argparse.ArgumentParser) -> None:
    """The option that lets a plugin's code run; `cli.main` runs it."""
    parser.add_argument(
        "--plugin", metavar="PATH", help="file or folder that defines the model's method; its code is run"
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The engine's short name: `with_engine` then reads it as the field."""
    parser.add_argument("--engine", choices=("megatron", "deepspeed"), help="short for --train.engine")


def with_engine(args: argparse.Namespace) -> list[str]:
    """The overrides of a command with `add_engine`."""
    return [*args.overrides, *(["--train.engine", args.engine] if args.engine else [])]
