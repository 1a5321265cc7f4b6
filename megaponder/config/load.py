"""YAML file + command line -> RunConfig, and back.

pydantic checks the types: it validates the standard dataclasses of the schema strictly and reports each mistake as data
(location, kind, value), which is what a one-sentence error needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pydantic

from megaponder.config import yaml_file
from megaponder.config.declare import refusal_of_both
from megaponder.config.fields import (
    FREE,
    SPELLINGS,
    accepts,
    all_fields,
    alternatives,
    current_name,
    describe_type,
    item_type,
    mapping_of,
    meant,
    nearest,
    renamed,
    sections,
)
from megaponder.config.model import FEATURES
from megaponder.config.overrides import parse_overrides
from megaponder.config.presets import PRESETS
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError

BUDGETS = ("train.steps", "train.tokens", "train.epochs")
_MEASURED = "data.document_tokens"
"""What a run fills in from its datasets: a number in its saved file is that of these fields."""
_MEASURED_ON = ("data.train", "data.split", "data.sequence_length", "data.document_attention")
_SHAPE = ("num_layers", "hidden_size", "num_heads")


def load_config(path: str | os.PathLike[str] | None, overrides: list[str] | None = None) -> RunConfig:
    """The configuration from a file (or the defaults) with command-line overrides applied.

    `overrides` are words such as ["--train.steps", "10", "--ponder.options.steps=3"].  A budget on the command line
    replaces the file's: `--train.steps 10` drops its train.tokens and train.epochs, and other data or samples drop its
    data.document_tokens, which follow from them.  A part of a mapping, such as
    `--model.moe.routers per_pass`, joins what the command line, the file or the preset says of the others.  ConfigError
    for the first mistake.
    """
    data = yaml_file.read(path) if path is not None else {}
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(str(path), data, "it must contain sections", f"the sections are: {', '.join(sections())}")
    data = _with_current_names(data)
    changes = parse_overrides(overrides or [])
    _refuse_hidden_preset(data, changes)
    for name, value in sorted(changes.items(), key=lambda change: mapping_of(change[0]) is not None):
        for other in BUDGETS if name in BUDGETS and value is not None else ():
            if other not in changes:
                _put(data, other, None)
        if name in _MEASURED_ON and _MEASURED not in changes:
            _put(data, _MEASURED, None)
        if whole := mapping_of(name):
            _start_from_preset(data, whole)
        _put(data, name, value)
    cfg = from_mapping(data)
    alone = "data.document_attention"
    chosen = alone in changes or "data.loss_mask" not in changes  # else answers replace what the file was written for
    there, field = _place(data, alone)
    if chosen and cfg.data.loss_mask == "answers" and there.get(field) is False:
        rule = "with data.loss_mask: answers each conversation attends to itself alone"
        raise ConfigError(alone, False, rule, "leave it out, or use true")
    return cfg


def _refuse_hidden_preset(data: dict[str, Any], changes: dict[str, Any]) -> None:
    """Fields override preset and family: with a resolved file, neither would have any effect on the command line."""
    model = data.get("model")
    family = changes.get("model.family")
    known = model if isinstance(model, dict) else {}
    if family not in (None, known.get("family")) and all(known.get(f) is not None for f in FEATURES):
        raise ConfigError(
            "--model.family", family, "the file sets every feature, which overrides a family",
            "remove those fields from the file",
        )  # fmt: skip
    if "model.preset" in changes and isinstance(model, dict) and all(model.get(f) is not None for f in _SHAPE):
        raise ConfigError(
            "--model.preset", changes["model.preset"], "the file sets every size, which overrides a preset",
            "remove those fields from the file",
        )  # fmt: skip


def _start_from_preset(data: dict[str, Any], whole: str) -> None:
    """Give a mapping of the model that nobody has given yet the preset's value, which a part of it joins."""
    holder, field = _place(data, whole)
    preset = PRESETS.get(str(holder.get("preset")))
    if preset and holder.get(field) is None and field in preset.more:
        _put(data, whole, preset.more[field])


def _put(data: dict[str, Any], name: str, value: Any) -> None:
    *parts, last = name.split(".")
    here = data
    for part in parts:
        inner = here.get(part)
        inner = dict(inner) if isinstance(inner, Mapping) else {}
        here[part] = inner
        here = inner
    here[last] = value


def _with_current_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which fields of earlier versions have their present names (`Declaration.was`)."""
    data = {k: dict(v) if isinstance(v, Mapping) else v for k, v in data.items()}
    for old in renamed():
        holder, field = _place(data, old)
        if field not in holder:
            continue
        new, value = current_name(old), holder.pop(field)
        assert new is not None
        there, field = _place(data, new)
        if field in there:
            raise refusal_of_both(old, new, value)
        _put(data, new, value)
        section = old.rpartition(".")[0]
        if section not in sections() and not holder:
            del data[section]
    return data


def _place(data: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Section and key of a dotted name; an empty section where the data have none."""
    section, _, field = name.rpartition(".")
    holder = data.get(section) if section else data
    return holder if isinstance(holder, dict) else {}, field


@lru_cache(maxsize=1)
def _adapter() -> pydantic.TypeAdapter[RunConfig]:
    return pydantic.TypeAdapter(RunConfig)


def from_mapping(data: Mapping[str, Any]) -> RunConfig:
    """RunConfig of nested plain data; ConfigError for unknown names and wrong types."""
    data = _with_current_names(data)
    _refuse_unknown(data)
    _refuse_non_values(data)
    try:
        # JSON mode is strict about scalars (true is not an integer, "3" is not a number) and still builds the
        # dataclasses
        return _adapter().validate_json(pydantic.TypeAdapter(Any).dump_json(data), strict=True)
    except pydantic.ValidationError as error:
        raise _as_config_error(error) from None


def _refuse_unknown(data: Mapping[str, Any]) -> None:
    legal = all_fields()
    for key, value in data.items():
        if key in sections():
            if not isinstance(value, Mapping):
                members = ", ".join(n for n in legal if n.startswith(f"{key}."))
                raise ConfigError(str(key), value, "this is a section", f"its fields are: {members}")
            for inner in value:
                name = f"{key}.{inner}"
                if name not in legal:
                    raise _unknown(name, value[inner])
        elif key not in legal:
            raise _unknown(str(key), value)


def _refuse_non_values(value: Any, name: str = "") -> None:
    """JSON has neither NaN nor infinity, so they would become null, which many fields read as their default; no path
    may contain a null character."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_non_values(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_non_values(inner, name)
    elif isinstance(value, str) and "\0" in value:
        raise ConfigError(name, value, "text must not contain a null character", "remove it")
    elif isinstance(value, str) and not yaml_file.is_unicode(value):
        raise ConfigError(name, value, "it is not valid Unicode (UTF-8)", "remove the incomplete character")
    elif isinstance(value, float) and not math.isfinite(value):
        field = all_fields().get(name)
        fix = f"the default is {show(field.default)}" if field else "use a number such as 0.5, or leave it out"
        raise ConfigError(name, value, "it must be a finite number", fix)


def _unknown(name: str, value: Any) -> ConfigError:
    close = meant(name, [*all_fields(), *sections()])
    section = name.partition(".")[0]
    members = [n for n in all_fields() if n.startswith(section + ".")] or [*sections(), "run"]
    fix = f"did you mean {close}" if close else f"legal here: {', '.join(members)}"
    shown = "{...}" if isinstance(value, Mapping) else value
    return ConfigError(name, shown, "there is no such field", fix)


def _as_config_error(error: pydantic.ValidationError) -> ConfigError:
    first = error.errors()[0]
    parts = [str(p) for p in first["loc"]]
    name = next((".".join(parts[:n]) for n in (2, 1) if ".".join(parts[:n]) in all_fields()), ".".join(parts))
    field, value = all_fields()[name], first["input"]
    is_item = any(isinstance(place, int) for place in first["loc"])
    fix = _legal_spelling(item_type(field.type) if is_item else field.type, value)
    rule = f"it must be {describe_type(field.type)}"
    return ConfigError(name, value, rule, fix or f"the default is {show(field.default)}")


def _legal_spelling(kind: Any, value: Any) -> str | None:
    """Advice to write a value the way the type expects it (3.0 as 3, a as [a]), or the legal word closest to it."""
    if accepts(kind, int) and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if accepts(kind, list):
        with contextlib.suppress(pydantic.ValidationError):
            pydantic.TypeAdapter(kind).validate_python([value], strict=True)
            return f"write [{value}]"
    if not isinstance(value, str | int):
        return None
    close = nearest(SPELLINGS.get(str(value).lower(), str(value)), [w for w in alternatives(kind) if " " not in w])
    return f"did you mean {close}" if close else None


def show(value: Any) -> str:
    """A value as YAML writes it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def to_mapping(cfg: RunConfig) -> dict[str, Any]:
    """Nested plain data of a configuration: the inverse of `from_mapping`."""
    return dataclasses.asdict(cfg)


def dump(cfg: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write a configuration as YAML, atomically; `load_config(path, [])` gives the same one back."""
    yaml_file.write(to_mapping(cfg), path)


__all__ = ["BUDGETS", "FREE", "dump", "from_mapping", "load_config", "to_mapping"]
