"""argparse with this project's manners: no abbreviations, help that keeps its layout, one-sentence errors."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
from typing import Any, NoReturn

from megaponder.config.fields import all_fields, nearest
from megaponder.errors import UserError

Commands = Any
"""What `add_subparsers` returns (argparse keeps the type private)."""


def _sentence(name: str, action: argparse.Action, word: str | None) -> str:
    """What is wrong with an option's value (None: there is none), and the nearest legal one."""
    choices = [str(c) for c in action.choices or ()]
    listed = ", ".join(choices)
    if word is None:
        return f"{name}: it needs a value; {f'choose from {listed}' if choices else f'write {name} {action.metavar}'}"
    if action.nargs == 0:
        return f"{name} = {word}: it takes no value; it means: {action.help}"
    if choices:
        close = nearest(word, choices)
        fix = f"did you mean {close}" if close else f"choose from {listed}"
        return f"{name} = {word}: there is no such choice; {fix}"
    whole = getattr(action.type, "__name__", "") == "int"  # int itself, or a range of it
    kind = "an integer" if whole else "a number"
    fix = "leave it out" if action.default is None else f"the default is {action.default}"
    with contextlib.suppress(ValueError, OverflowError):
        fix = f"the nearest is {round(float(word))}" if whole else fix
    return f"{name} = {word}: it must be {kind}; {fix}"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are UserErrors."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """A UserError instead of usage and exit."""
        name, _, problem = message.removeprefix("argument ").partition(": ")
        action = next((a for a in self._actions if argparse._get_action_name(a) == name), None)
        if action is not None and problem.startswith(("expected", "invalid", "ignored")):
            word = re.search(r"'.*?'|\".*?\"", problem)
            message = _sentence(name, action, word[0][1:-1] if word else None)
        raise UserError(f"{self.prog}: {message} (see {self.prog} --help).")

    def refuse_value_of_switch(self, words: list[str], unknown: list[str]) -> None:
        """A UserError for a switch (--profile) followed by a word that nothing takes."""
        for option, word in itertools.pairwise(words):
            action = self._option_string_actions.get(option)
            if action is not None and action.nargs == 0 and word in unknown and not word.startswith("-"):
                self.error(f"argument {argparse._get_action_name(action)}: ignored explicit argument {word!r}")

    def refuse_unknown(self, words: list[str]) -> NoReturn:
        """Name the first word that no option takes, and the nearest option."""
        word = next((w for w in words if w.startswith("-")), words[0]).partition("=")[0]
        fields = all_fields() if "--section" in (self.usage or "") else ()
        field = nearest(word.lstrip("-"), fields)
        # an option that looks much like it, else a field, else an option that looks a little like it
        close = nearest(word, self._option_string_actions, 0.75) or (f"--{field}" if field else None)
        close = close or nearest(word, self._option_string_actions)
        fix = f"did you mean {close}" if close else f"see {self.prog} --help"
        raise UserError(f"{self.prog}: it takes no {word}; {fix}.")

    def command_parser(self, command: str) -> Parser:
        """The parser of a command."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices[command]
        raise KeyError(command)
