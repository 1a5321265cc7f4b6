"""Modelling files: which belong to this version, and how a folder's files are run.

The text that is compared is the text that is run: files are read once, and modules are created from those bytes.
Nothing comes from compiled files (.pyc), from transformers' folder of downloaded modules, or from earlier imports.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import itertools
import re
import sys
from functools import lru_cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from megaponder import files
from megaponder.errors import UserError
from megaponder.export import compose
from megaponder.ponder import registry

LARGEST = 1 << 22
"""Maximum bytes of a modelling file."""
_CLASS = re.compile(r"([A-Za-z_]\w*)\.([A-Za-z_]\w*)")
_numbers = itertools.count()


EARLIER = {"f9f33cf5c342dfca3663bfc625f5ef5f7413e51cdaf432da1737c7b3575ae6e8"}
"""SHA-256 of the single modelling file of earlier exports."""


def composed(method: str) -> dict[str, bytes]:
    """Name and content of every modelling file in an export of this version with this method."""
    if method not in registry.methods() or registry.decoding_class(method) is None:
        return {}
    return {name: text.encode() for name, text in compose.files(method).items()}


def is_ours(sources: dict[str, bytes], method: str) -> bool:
    """Whether all of these files are this version's."""
    ours = composed(method)
    return all(ours.get(name) == content for name, content in sources.items())


def is_earlier(sources: dict[str, bytes]) -> bool:
    """Whether these are an earlier version's, for which the current code is run instead."""
    return all(hashlib.sha256(content).hexdigest() in EARLIER for content in sources.values())


def read(folder: Path, reference: object, method: str, trusted: bool) -> tuple[str, dict[str, bytes]]:
    """`reference` (file.Class of an auto_map), and the files that it needs by name.

    UserError if one of them is missing, lies outside the folder or, unless `trusted`, is neither this version's nor in
    `EARLIER`.
    """
    match = _CLASS.fullmatch(reference) if isinstance(reference, str) else None
    if match is None:
        raise UserError(
            f"{folder}: its model cannot be loaded (auto_map = {reference!r} does not name a class of a file in this "
            "folder)."
        )
    ours, found, wanted = composed(method), {}, [f"{match[1]}.py"]
    for name in wanted:  # grows during the loop
        if name in found:
            continue
        path = files.inside(folder, name)
        if not path.is_file():
            raise UserError(f"{folder / name} is missing.")
        content = files.read_bounded(path, LARGEST)
        if not trusted and content != ours.get(name) and not is_earlier({name: content}):
            raise UserError(
                f"{folder / name} is not a modelling file of this version, and loading the model runs it; read it, "
                "then use --trust-remote-code."
            )
        found[name] = content
        wanted += _neighbours(content)
    return match[0], found


@lru_cache(maxsize=64)
def _neighbours(content: bytes) -> tuple[str, ...]:
    """Files of the same folder that a file imports: `from .name import ...` and `from . import name`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found += [node.module] if node.module else [alias.name for alias in node.names]
    return tuple(f"{name}.py" for name in found)


@lru_cache(maxsize=64)
def _compiled(content: bytes) -> CodeType:
    """The code of a file's bytes: an export is loaded several times, and each time would take half a second."""
    return compile(content, "", "exec")


def _of_file(code: CodeType, path: str) -> CodeType:
    """The same code with the path of its file, for tracebacks."""
    inner = tuple(_of_file(c, path) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=path, co_consts=inner)


def load(folder: Path, reference: str, sources: dict[str, bytes]) -> Any:
    """The class that `reference` names, from `sources` as `read` gives them."""
    package = f"megaponder_export_{next(_numbers)}"  # new for each load, so nothing has been imported under this name
    sys.meta_path.insert(0, _Sources(package, folder, sources))
    file, _, name = reference.partition(".")
    return getattr(importlib.import_module(f"{package}.{file}"), name)


class _Sources(MetaPathFinder, Loader):
    """Creates the modules of a package from bytes in memory."""

    def __init__(self, package: str, folder: Path, sources: dict[str, bytes]):
        self._package, self._folder, self._sources = package, folder, sources

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The package itself, or a module that has a source."""
        if name == self._package:
            return ModuleSpec(name, self, is_package=True)
        package, _, last = name.rpartition(".")
        if package != self._package or f"{last}.py" not in self._sources:
            return None
        return ModuleSpec(name, self, origin=str(self._folder / f"{last}.py"))

    def exec_module(self, module: ModuleType) -> None:
        """Run the bytes of the module's source."""
        if module.__name__ != self._package:
            name = f"{module.__name__.rpartition('.')[2]}.py"
            exec(_of_file(_compiled(self._sources[name]), str(self._folder / name)), module.__dict__)
