"""argparse with this project's manners: no abbreviations, help that keeps its layout, one-sentence errors."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from megaponder.config.fields import all_fields, nearest
from megaponder.errors import UserError

Commands = Any
"""What `add_subparsers` returns (argparse keeps the type private)."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are UserErrors."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """A UserError instead of usage and exit."""
        action, _, wrong = message.partition("invalid choice: ")
        if wrong:
            word = wrong.split("'")[1] if "'" in wrong else wrong
            close = nearest(word, self._choices())
            fix = f"did you mean {close}" if close else f"choose from {', '.join(self._choices())}"
            message = f"{action.removeprefix('argument ').rstrip(': ')} = {word}: there is no such choice; {fix}"
        raise UserError(f"{self.prog}: {message} (see {self.prog} --help).")

    def _choices(self) -> list[str]:
        return [str(c) for action in self._actions if action.choices for c in action.choices]

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
