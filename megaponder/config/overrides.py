"""Command-line overrides: `--section.field value`, `--section.field=value`, lists as several values."""

from __future__ import annotations

from typing import Any

from megaponder.config import yaml_file
from megaponder.config.fields import Field, accepts, all_fields, current_name, item_type, mapping_of, meant, sections
from megaponder.errors import ConfigError


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """Dotted names and values of command-line words.

    Values are YAML, except for text fields (`--run 2024` is the text "2024").  A list field takes several words
    (`--data.train 0.3 wiki 0.7 books`) or one YAML list; words that may be paths are taken literally unless quoted.
    ConfigError for an unknown name or a missing value.
    """
    found: dict[str, Any] = {}
    i = 0
    while i < len(words):
        word = words[i]
        if not word.startswith("--"):
            raise ConfigError("command line", word, "this value has no field", "write --section.field value")
        name, equals, value = word[2:].partition("=")
        name = current_name(name) or name
        i += 1
        values = [value] if equals else []
        while not equals and i < len(words) and not words[i].startswith("--"):
            values.append(words[i])
            i += 1
        found[name] = _value(name, values)
    return found


def _value(name: str, values: list[str]) -> Any:
    field = _field(name, " ".join(values))
    option = f"--{name}"
    if not values:
        raise ConfigError(option, "", "it needs a value", f"write {option} {_example(field)}")
    is_list = field is not None and accepts(field.type, list)
    if len(values) > 1:
        if not is_list:
            raise ConfigError(option, " ".join(values), "it takes one value", f"write {option} {values[0]}")
        return [_item(field, v, option) for v in values]
    text = values[0]
    if field is not None and accepts(field.type, str) and not is_list:
        if text in ("null", "~"):
            return None
        mixed = accepts(field.type, float) or accepts(field.type, bool)
        return yaml_file.parse(text, option) if mixed else text
    in_yaml = ("[", "{") if field is not None and accepts(field.type, dict) else ("[",)
    plain = is_list and text not in ("null", "~") and not text.lstrip().startswith(in_yaml)
    value = _item(field, text, option) if plain else yaml_file.parse(text, option)
    return [value] if is_list and value is not None and not isinstance(value, list | dict) else value


def _item(field: Field | None, text: str, option: str) -> Any:
    """One word of a list: YAML, except that a path is taken literally, whatever `#`, `: ` or `- ` would mean in
    YAML."""
    may_be_path = field is not None and accepts(field.type, list) and accepts(item_type(field.type), str)
    if not may_be_path or text.lstrip().startswith(("'", '"')):
        return yaml_file.parse(text, option)
    try:
        float(text)
    except ValueError:
        return text
    return yaml_file.parse(text, option)


def _field(name: str, value: str) -> Field | None:
    """The field of an option; None for a part of a mapping, such as an option of the method; ConfigError if there is no
    such field."""
    if name in all_fields():
        return all_fields()[name]
    if mapping_of(name):
        return None
    section = name.partition(".")[0]
    fields = ", ".join(f"--{n}" for n in all_fields() if n.startswith(section + "."))
    if name in sections():
        raise ConfigError(f"--{name}", value, "this is a section, not a field", f"its fields are: {fields}")
    whole, _, part = name.rpartition(".")
    if whole in all_fields() and accepts(all_fields()[whole].type, dict):
        example = f"write --{whole} '{{{part}: {value or 'VALUE'}}}', with all that it has to say"
        raise ConfigError(f"--{name}", value, f"{whole} is given as a whole", example)
    close = meant(name, all_fields())
    fix = f"the fields of {section} are: {fields}" if fields else f"the sections are: {', '.join(sections())}"
    fix = f"did you mean --{close}" if close else fix
    raise ConfigError(f"--{name}", value, "there is no such field", fix)


def _example(field: Field | None) -> str:
    if field is None:
        return "VALUE"
    if accepts(field.type, bool):
        return "true"
    return str(field.default) if field.default not in (None, [], {}) else "VALUE"
