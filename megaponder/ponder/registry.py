"""All methods by name, and what belongs to one: its options from a config, its decoding form."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import megaponder.ponder.methods  # noqa: F401  registers the shipped ones
from megaponder.config.declare import Declaration, declaration, refusal_of_both, warn_of_rename
from megaponder.config.fields import nearest
from megaponder.config.schema import PonderConfig
from megaponder.errors import ConfigError
from megaponder.ponder.base import REGISTERED, Method, Shape
from megaponder.ponder.plugins import load_installed

if TYPE_CHECKING:
    from megaponder.decoding.method import DecodingMethod


def methods() -> dict[str, type[Method]]:
    """All known methods by name: shipped, installed beside the package, and of plugins that were loaded."""
    load_installed()
    return dict(REGISTERED)


def build_method(name: str, options: Mapping[str, Any], shape: Shape) -> Method:
    """The method of a config; refuses unknown names and options."""
    known = methods()
    if name not in known:
        raise ConfigError(
            "ponder.method",
            name,
            "there is no such method",
            f"{_meant(name, known)}known methods: {', '.join(sorted(known))}; for your own, set ponder.plugin",
        )
    cls = known[name]
    return cls(parse_options(cls, options), shape)


def parse_options(cls: type[Method], values: Mapping[str, Any]) -> Any:
    """Options of a method from the config's mapping; unknown names and wrong types are ConfigErrors."""
    known = {f.name: f for f in fields(cls.Options)}
    defaults, values = cls.Options(), _with_current_names(cls, values)
    for name, value in values.items():
        if name not in known:
            legal = ", ".join(known) or "none"
            raise ConfigError(
                f"ponder.options.{name}",
                value,
                f"{cls.name} has no such option",
                f"{_meant(name, known)}its options are: {legal}",
            )
        want = type(getattr(defaults, name))
        if type(value) is int and want is float:
            continue
        if type(value) is not want:
            raise ConfigError(
                f"ponder.options.{name}",
                value,
                f"it must be of type {want.__name__}",
                f"the default is {getattr(defaults, name)!r}",
            )
        declared = declaration(known[name])
        declared.check(f"ponder.options.{name}", value, getattr(defaults, name))
        other = declared.unless
        if other and other not in values and (usual := getattr(defaults, other)):
            rule = f"it has no effect with ponder.options.{other}, which is {usual} unless it is given"
            fix = f"set {other} to 0.0, or leave {name} out"
            raise ConfigError(f"ponder.options.{name}", value, rule, fix)
    return cls.Options(**values)


def _meant(wrong: object, legal: Iterable[str]) -> str:
    """The beginning of an advice: the name that a misspelt one comes close to, if there is one."""
    close = nearest(str(wrong), legal)
    return f"did you mean {close}? " if close else ""


def options_that_differ(saved: PonderConfig, now: PonderConfig) -> dict[str, tuple[Any, Any, Declaration]]:
    """Options with another value than that of a run of the same method: then, now, and what they declare."""
    if saved.method != now.method:
        return {}
    cls = methods()[now.method]
    then, here = (parse_options(cls, ponder.options) for ponder in (saved, now))
    values = {f.name: (getattr(then, f.name), getattr(here, f.name), declaration(f)) for f in fields(cls.Options)}
    return {name: found for name, found in values.items() if found[0] != found[1]}


def changed_defaults(name: str) -> dict[str, Any]:
    """Options of a method whose default was another in earlier versions, with that one; none of a method that is not
    known here."""
    cls = methods().get(name)
    every = {f.name: declaration(f).earlier for f in fields(cls.Options)} if cls else {}
    return {option: earlier for option, earlier in every.items() if earlier is not None}


def _with_current_names(cls: type[Method], values: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the present names of those that earlier versions called otherwise (`Declaration.was`)."""
    now = {old: f.name for f in fields(cls.Options) for old in declaration(f).was}
    for old in now.keys() & values.keys():
        names = f"ponder.options.{old}", f"ponder.options.{now[old]}"
        if now[old] in values:
            raise refusal_of_both(*names, values[old])
        warn_of_rename(*names)
    return {now.get(name, name): value for name, value in values.items()}


def decoding_module(cls: type[Method]) -> str | None:
    """Dotted name of a method's decoding form, the module `decoding` beside its training form; None: it has none."""
    folder = cls.__module__.rpartition(".")[0]
    name = f"{folder}.decoding"
    return name if folder and importlib.util.find_spec(name) else None


def decoding_class(method: str) -> type[DecodingMethod] | None:
    """The decoding form of a method; None where it has none.  Needs transformers."""
    module = decoding_module(methods()[method])
    if module is None:
        return None
    from megaponder.decoding.method import DecodingMethod

    forms = [x for x in vars(importlib.import_module(module)).values() if isinstance(x, type)]
    (form,) = [x for x in forms if issubclass(x, DecodingMethod) and getattr(x, "name", None) == method]
    return form
