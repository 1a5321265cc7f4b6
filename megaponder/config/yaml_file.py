"""YAML 1.2 in and out: `off` is text, 3e-4 is a number, a duplicate key is an error, files are written atomically."""

from __future__ import annotations

import copy
import io
import json
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.representer import SafeRepresenter

from megaponder import files
from megaponder.config.fields import nearest
from megaponder.errors import ConfigError

T = TypeVar("T")
LARGEST = 1 << 21
"""Bytes of a YAML file: reading this many takes about ten seconds; the longest legal blend needs less."""
MOST_VALUES = 200_000
"""Values of a YAML text with its aliases expanded."""


_parsed: dict[str, Any] = {}
"""The value of the last text: a start reads the configuration of a checkpoint twice, which takes 50 ms each."""
_written: dict[str, str] = {}
"""Texts of the last sections, by their representation: of a run's folder, its checkpoints, and the next run."""


def _remember(last: dict[str, T], key: str, value: T, most: int = 1) -> T:
    while len(last) >= most:
        del last[next(iter(last))]
    last[key] = value
    return value


def parse(text: str, name: str) -> Any:
    """The value of a YAML text; `name` is the file or option it came from, for the error message."""
    if len(text) > LARGEST:
        raise ConfigError(name, text[:20] + "...", f"it has more than {LARGEST:,} characters", "write a shorter one")
    try:
        if (known := _parsed.get(text)) is None:
            _refuse_bomb(text, name)
            value = YAML(typ="safe", pure=True).load(text)
            json.dumps(value, default=str, skipkeys=True)
            known = _remember(_parsed, text, _joined(value))
        return copy.deepcopy(known)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        # the library appends both values as it parsed them, which is not what the file says
        problem = problem.partition(" with value ")[0] if isinstance(error, DuplicateKeyError) else problem
        rule = f"not YAML ({where}{problem})"
        raise ConfigError(name, _excerpt(text, mark), rule, "write `key: value` lines") from None
    except (RecursionError, ValueError) as error:  # nested too deeply or recursively, or huge numbers
        rule = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise ConfigError(name, _excerpt(text, None), rule, "write plain values") from None


def _refuse_bomb(text: str, name: str) -> None:
    """ConfigError for nested aliases (*a) that expand to more values than any configuration has."""
    if "&" not in text or "*" not in text:
        return
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0  # a node inside itself, which is rejected elsewhere
            parts = node.value if isinstance(node.value, list) else []
            flat = [n for part in parts for n in (part if isinstance(part, tuple) else (part,))]
            sizes[id(node)] = 1 + sum(map(size, flat))
        return sizes[id(node)]

    node = YAML(typ="safe", pure=True).compose(text)
    if node is not None and (count := size(node)) > MOST_VALUES:
        rule = f"its aliases expand to {count:.2g} values; at most {MOST_VALUES:,} are allowed"
        raise ConfigError(name, _excerpt(text, None), rule, "write plain values")


def is_unicode(text: str) -> bool:
    """Whether a text has no surrogates, which bytes that are not UTF-8 become in command-line arguments."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _joined(value: Any) -> Any:
    """Joins characters that JSON writes as surrogate pairs (\\ud83d\\ude00); a lone surrogate stays and is rejected
    later."""
    if isinstance(value, dict):
        return {_joined(k): _joined(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_joined(v) for v in value]
    if not isinstance(value, str) or is_unicode(value):
        return value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _excerpt(text: str, mark: Any) -> str:
    """The excerpt around an error, short enough for one line."""
    lines = text.splitlines() or [""]
    if not mark:
        return lines[0][:80]
    line, first = lines[min(mark.line, len(lines) - 1)], max(0, mark.column - 60)
    return line[first : first + 80].strip()


def read(path: str | os.PathLike[str]) -> Any:
    """The value of a YAML file; ConfigError if it is absent, unreadable or not YAML."""
    path = Path(path)
    try:
        # a shell's <(...) is /dev/fd/63, which has a writer; opening a named pipe could block for ever
        if files.is_special(path) and not (path.is_fifo() and str(path).startswith(("/dev/", "/proc/"))):
            raise ConfigError("configuration file", str(path), "it is a pipe or a device", "name a YAML file")
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            rule = f"it is larger than {LARGEST:,} bytes"
            raise ConfigError("configuration file", str(path), rule, "name a configuration")
        return parse(content.decode(), str(path))
    except FileNotFoundError:
        folder, there = path.parent, _yaml_files(path.parent)
        close = {Path(name).stem: name for name in there}.get(nearest(path.stem, [Path(n).stem for n in there]) or "")
        fix = f"did you mean {folder / close}?" if close else f"{folder} has {', '.join(there[:8]) or 'no YAML file'}"
        raise ConfigError("configuration file", str(path), "there is no such file", fix.rstrip("?")) from None
    except IsADirectoryError:
        there = _yaml_files(path)
        fix = f"name a file, for example {path / there[0]}" if there else "name a YAML file; it has none"
        raise ConfigError("configuration file", str(path), "this is a folder", fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("configuration file", str(path), f"it cannot be read ({error})", "check it") from None


def _yaml_files(folder: Path) -> list[str]:
    """Names of a folder's YAML files, except hidden ones, which belong to tools."""
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    return [name for name in names if name.endswith((".yaml", ".yml")) and not name.startswith(".")]


_YAML_1_1 = re.compile(r"(?i)y|n|yes|no|on|off|[-+]?\d[\d_]*(:[0-5]?\d)+(\.\d*)?")


class _Representer(SafeRepresenter):
    """Lists on one line, without touching the library's own class."""

    def text(self, text: str) -> Any:
        """Text that starts with a symbol is quoted, since the library writes `[?0]` bare but reads it as a mapping key.

        So is text that YAML 1.1 reads as a boolean or as sexagesimal; unprintable text is escaped.
        """
        quote = None if re.match(r"[\w./~]", text) and not _YAML_1_1.fullmatch(text) else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=quote if text.isprintable() else '"')

    def row(self, items: list[Any]) -> Any:
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Representer.add_representer(str, _Representer.text)
_Representer.add_representer(list, _Representer.row)


def to_text(value: Any) -> str:
    """YAML of plain data."""
    if isinstance(value, dict) and len(value) > 1:
        return "".join(to_text({name: section}) for name, section in value.items())
    if (known := _written.get(repr(value))) is not None:
        return known
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # keys in the schema's order
    yaml.default_flow_style = False
    yaml.width = 110
    out = io.StringIO()
    yaml.dump(value, out)
    return _remember(_written, repr(value), out.getvalue(), most=64)


def write(value: Any, path: str | os.PathLike[str]) -> None:
    """Write plain data as YAML atomically: readers see the old file or the new one, even after a crash."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(path, to_text(value).encode())
