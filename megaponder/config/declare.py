"""What a field of the configuration says about itself, beside its type, its default and the docstring under it.

    lr: float = declare(3e-4, gt=0, le=1, resume="warned", aliases=("learning_rate",))
    \"\"\"Peak learning rate.\"\"\"

Help, documentation, refusals and the checks at a resume read these declarations.  A rule that relates several fields is
a function in `megaponder.config.rules`.  The range is no constraint of pydantic's, which would refuse while a file is
read: values from presets, defaults and code need the check too, and an old checkpoint must stay readable when a range
becomes narrower.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import Field, dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from megaponder.config import launcher
from megaponder.errors import ConfigError

T = TypeVar("T")
Change = Literal["refused", "asked", "warned", "free"]
"""What happens to a value that differs from the checkpoint's: an error, an error unless `checkpoint.load_changes` names
the field, a warning, or nothing."""
LARGEST = 2**31 - 1
"""Bound of integers that declare none: what arrays and messages can number."""


@dataclass(frozen=True)
class Declaration:
    """What a field declares."""

    gt: float | None = None
    """Numbers are greater than this; with `ge`, `lt` and `le` the range, under pydantic's names.  It also holds for the
    numbers of a list; null and words have no range."""
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    unit: str = ""
    """What a number counts."""
    resume: Change = "free"
    """May the value change when a run goes on."""
    load: Change | None = None
    """The same where only a checkpoint's weights are loaded (`checkpoint.load`); default: refused if `resume` is."""
    feature: bool = False
    """A feature of the backbone, which the family fills in."""
    compared: bool = True
    """Runs that are compared must have the same value (`megaponder.compare`)."""
    aliases: tuple[str, ...] = ()
    """Names that other systems use for the field; the advice on an unknown name looks here."""
    was: tuple[str, ...] = ()
    """Names of the field in earlier versions, dotted (a method's option: plain); they are read with a warning."""
    earlier: Any = None
    """Of a method's option: its default in earlier versions, where that was another; a run that does not state the
    option meant this."""
    unless: str = ""
    """Of a method's option: name of another one that leaves this one without effect unless it is 0.  Who gives this one
    has to give that one, too."""

    @property
    def change_at_load(self) -> Change:
        """`load`, or what follows from `resume`."""
        return self.load or ("refused" if self.resume == "refused" else "free")

    @property
    def range(self) -> str:
        """The range in words, such as 'more than 0 and at most 1'; empty where none is declared."""
        ends = (("more than", self.gt), ("at least", self.ge), ("less than", self.lt), ("at most", self.le))
        return " and ".join(f"{words} {_number(end)}" for words, end in ends if end is not None)

    def check(self, name: str, value: Any, default: Any) -> None:
        """ConfigError for a number outside the range, by itself or in a list."""
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            largest = LARGEST if isinstance(number, int) else math.inf
            least = -largest if self.ge is None else self.ge
            most = largest if self.le is None else self.le
            if not least <= number <= most:
                end, words = (least, "at least") if number < least else (most, "at most")
                words = f"{words} {_number(end)}"
                rule = f"it must be {self.range if words in self.range else words}"
                raise ConfigError(name, value, rule, f"the nearest is {_number(end).replace(',', '')}")
            if (self.gt is not None and number <= self.gt) or (self.lt is not None and number >= self.lt):
                fix = "leave it out" if default is None else f"the default is {default}"
                raise ConfigError(name, value, f"it must be {self.range}", fix)


class RenamedField(FutureWarning):
    """A file or command line uses a name of an earlier version."""


def warn_of_rename(old: str, new: str) -> None:
    """One warning, given by the first process of all."""
    if launcher.place().rank == 0:
        warnings.warn(f"{old} is now called {new}; please rename it.", RenamedField, stacklevel=3)


def refusal_of_both(old: str, new: str, value: Any) -> ConfigError:
    """What to raise where both names are used."""
    return ConfigError(old, value, f"it is now called {new}, which is given too", "take the old one out")


def _number(end: float) -> str:
    return f"{end:,}" if isinstance(end, int) else f"{end:g}"


def declare(default: T, **said: Any) -> T:
    """A field of a dataclass with this default; the keywords are the attributes of `Declaration`."""
    metadata = {"declaration": Declaration(**said)}
    if isinstance(default, list | dict):
        made: T = field(default_factory=partial(copy.copy, default), metadata=metadata)
    else:
        made = field(default=default, metadata=metadata)
    return made


def declaration(of: Field[Any]) -> Declaration:
    """What a field declares; nothing where it was not made by `declare`."""
    found: Declaration = of.metadata.get("declaration", Declaration())
    return found
