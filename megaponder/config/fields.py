"""What the configuration tree knows about itself: the name, type, default, docstring and declaration of each field."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
import types
import typing
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal, Union

from megaponder.config.declare import Declaration, declaration, warn_of_rename
from megaponder.config.schema import RunConfig

FREE = "ponder.options"
"""The one mapping whose keys are not in the schema: the method checks them."""


@dataclass(frozen=True)
class Field:
    """One leaf of the tree."""

    name: str
    """Dotted, for example train.global_batch."""
    type: Any
    default: Any
    doc: str
    declared: Declaration

    @property
    def legal(self) -> str:
        """Type, range and unit in words: 'an integer, at least 1, in tokens'."""
        unit = f"in {self.declared.unit}" if self.declared.unit else ""
        return ", ".join(filter(None, (describe_type(self.type), self.declared.range, unit)))


def attribute_docs(cls: type) -> dict[str, str]:
    """Docstrings under the attributes of a dataclass and its bases; Python keeps them only in the source."""
    docs: dict[str, str] = {}
    for base in cls.__bases__:
        if dataclasses.is_dataclass(base):
            docs |= attribute_docs(base)
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for before, after in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[before.target.id] = inspect.cleandoc(after.value.value)
    return docs


def _walk(cls: type, prefix: str) -> typing.Iterator[Field]:
    hints, docs = typing.get_type_hints(cls), attribute_docs(cls)
    for f in dataclasses.fields(cls):
        name, kind = prefix + f.name, hints[f.name]
        if dataclasses.is_dataclass(kind):
            yield from _walk(typing.cast(type, kind), name + ".")
            continue
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        yield Field(name, kind, default, docs.get(f.name, ""), declaration(f))


@lru_cache(maxsize=1)
def all_fields() -> dict[str, Field]:
    """Every leaf of RunConfig by its dotted name, in the order of the schema."""
    return {f.name: f for f in _walk(RunConfig, "")}


def value_of(cfg: RunConfig, name: str) -> Any:
    """Value of a dotted field or section."""
    return attrgetter(name)(cfg)


@lru_cache(maxsize=1)
def sections() -> dict[str, type]:
    """Names and classes of the sections."""
    hints = typing.get_type_hints(RunConfig)
    return {name: kind for name, kind in hints.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


@lru_cache(maxsize=1)
def aliases() -> dict[str, str]:
    """Names that other systems use, and our fields."""
    return {alias: f.name for f in all_fields().values() for alias in f.declared.aliases}


@lru_cache(maxsize=1)
def renamed() -> dict[str, str]:
    """Names of earlier versions, and those of today."""
    return {old: f.name for f in all_fields().values() for old in f.declared.was}


def current_name(old: str) -> str | None:
    """Today's name of a field that an earlier version called otherwise, with a warning; None where none did."""
    new = renamed().get(old)
    if new is not None:
        warn_of_rename(old, new)
    return new


SPELLINGS = {
    "yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false",
    "transformer_engine": "te", "transformer-engine": "te", "pytorch": "local", "torch": "local",
    "bfloat16": "bf16", "float32": "fp32", "full": "layer",
}  # fmt: skip
"""Words that other systems use for these values."""


def nearest(wrong: str, legal: typing.Iterable[str], cutoff: float = 0.6) -> str | None:
    """The legal name closest to a misspelt one.

    The same word in a different case (BF16) comes first.  For dotted names: the same last part or its alias, then a
    similar one in the same section, then anywhere.
    `cutoff`: minimum similarity, from 0 to 1.
    """
    legal = list(legal)
    for name in legal:
        if name.lower() == wrong.lower():
            return name
    section, dot, tail = wrong.rpartition(".")
    if aliases().get(tail) in legal:
        return aliases()[tail]
    tails = {name.rpartition(".")[2]: name for name in reversed(legal)}
    if tail in tails:
        return tails[tail]
    if dot:
        here = {t: f"{section}.{t}" for t in tails if f"{section}.{t}" in legal}
        for candidates in (here, tails):
            close = difflib.get_close_matches(tail, list(candidates), n=1, cutoff=cutoff)
            if close:
                return candidates[close[0]]
        return None  # complete dotted names look alike because of their sections
    close = difflib.get_close_matches(wrong, legal, n=1, cutoff=cutoff)
    if close:
        return close[0]
    close = difflib.get_close_matches(tail, list(tails), n=1, cutoff=cutoff)
    return tails[close[0]] if close else None


def meant(wrong: str, legal: typing.Iterable[str]) -> str | None:
    """What a misspelt field is called, as `nearest`; in the section of the method, where nothing else there is like it,
    an option of the method: which those are is not known here."""
    section, dot, tail = wrong.partition(".")
    whole, _, inner = FREE.partition(".")
    if section != whole or not dot:
        return nearest(wrong, legal)
    first, _, rest = tail.partition(".")
    if rest:
        return f"{FREE}.{rest}" if nearest(first, [inner]) else None
    return nearest(wrong, [name for name in legal if name.startswith(f"{whole}.")]) or f"{FREE}.{tail}"


_WORDS = {int: "an integer", float: "a number", str: "text", type(None): "null"}


def alternatives(kind: Any) -> list[str]:
    """What a type accepts: literal words verbatim (true, auto, null), anything else described ('an integer')."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return [word for a in args for word in alternatives(a)]
    if origin is Literal:
        return [str(a) for a in args]
    if origin is list:
        names = [name.removeprefix("an ").removeprefix("a ") + "s" for name in alternatives(args[0])]
        return ["a list of " + " or ".join(names)]
    if origin is dict:
        return ["a mapping"]
    return ["true", "false"] if kind is bool else [_WORDS.get(kind, getattr(kind, "__name__", str(kind)))]


def describe_type(kind: Any) -> str:
    """A type in words: 'an integer', 'one of none, layer', 'true, false or auto', 'a list of texts or numbers'."""
    *first, last = alternatives(kind)
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join([*first, last])
    return f"{', '.join(first)} or {last}" if first else last


def mapping_of(name: str) -> str | None:
    """The field that a dotted name is a part of, if it is a mapping (model.moe of model.moe.routers)."""
    return next((w for w, f in all_fields().items() if name.startswith(f"{w}.") and _is_mapping(f.type)), None)


def _is_mapping(kind: Any) -> bool:
    """Whether a type is a mapping and never a list (data.valid is either, and has no parts)."""
    return accepts(kind, dict) and not accepts(kind, list)


def item_type(kind: Any) -> Any:
    """Type of a list's items, also if the list may be null."""
    of_list = kind if typing.get_origin(kind) is list else next(a for a in typing.get_args(kind) if accepts(a, list))
    return typing.get_args(of_list)[0]


def accepts(kind: Any, wanted: type) -> bool:
    """Whether a type is `wanted` or a union that has it."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        return any(accepts(a, wanted) for a in typing.get_args(kind))
    return kind is wanted or typing.get_origin(kind) is wanted
