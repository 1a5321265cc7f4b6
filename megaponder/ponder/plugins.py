"""Methods from outside the package: installed ones, and files or folders named by the user.

An installed package registers methods by an entry point of the group `megaponder.methods` in its pyproject.toml:

    [project.entry-points."megaponder.methods"]
    mine = "my_package.mine.training"

A plugin is a Python file with a method, or a folder whose `training.py` has one and whose `decoding.py`, if it is
there, has its decoding form.  Its code is run by `load_plugin` and by nothing else, for the path that `ponder.plugin`
of the user's own configuration or `--plugin` names.  Code named by a checkpoint or an export folder is never run.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from megaponder.errors import ConfigError, UserError, first_line
from megaponder.ponder.base import REGISTERED

log = logging.getLogger(__name__)
GROUP = "megaponder.methods"
PACKAGE = "megaponder_plugins"
"""The package whose modules the plugins become."""


@cache
def load_installed() -> None:
    """Import what installed packages register.  If one cannot be imported, a warning names it."""
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            kind = type(error).__name__
            log.warning(
                "The method %s of package %s cannot be used (%s: %s).",
                *(entry.name, entry.dist.name if entry.dist else "?", kind, first_line(error).rstrip(".")),
            )


def load_plugin(path: str | Path) -> None:
    """Run a plugin, which registers its methods; only once, however often this is called."""
    where = Path(path).resolve()
    file = where / "training.py" if where.is_dir() else where
    if not file.is_file() or file.suffix != ".py":
        fix = "name a file x.py, or a folder with a file training.py"
        raise ConfigError("ponder.plugin", str(path), f"there is no Python file {file}", fix)
    name = f"{PACKAGE}.{where.stem}"
    if (known := sys.modules.get(name)) is not None:
        if known.__dict__["PLUGIN"] != where:
            raise UserError(f"ponder.plugin = {str(path)!r}: the plugin {known.PLUGIN} has the same name; rename one.")
        return
    before = dict(REGISTERED)
    try:
        _import(name, where)
        if before == REGISTERED:
            raise UserError(f"ponder.plugin = {str(path)!r}: it registers no method; mark a class with @register.")
    except Exception as error:
        REGISTERED.clear()
        REGISTERED.update(before)
        for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[module]
        if isinstance(error, UserError):
            raise
        said = f"{type(error).__name__}: {first_line(error).rstrip('.')}{_line(error, where)}"
        raise UserError(f"ponder.plugin = {str(path)!r}: it cannot be run ({said}).") from error


def is_loaded(path: str | Path) -> bool:
    """Whether this plugin was run."""
    where = Path(path).resolve()
    module = sys.modules.get(f"{PACKAGE}.{where.stem}")
    return module is not None and module.__dict__["PLUGIN"] == where


def _import(name: str, where: Path) -> None:
    importlib.invalidate_caches()
    sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE)).__path__ = []
    init, spec = where / "__init__.py", ModuleSpec(name, None, is_package=True)
    if not where.is_dir() or init.is_file():
        places = [str(where)] if where.is_dir() else None
        found = importlib.util.spec_from_file_location(
            name, init if where.is_dir() else where, submodule_search_locations=places
        )
        assert found is not None
        spec = found
    module = importlib.util.module_from_spec(spec)
    module.__dict__["PLUGIN"] = where
    sys.modules[name] = module
    if where.is_dir():
        module.__path__ = [str(where)]
    if spec.loader is not None:
        spec.loader.exec_module(module)
    if where.is_dir():
        importlib.import_module(f"{name}.training")


def _line(error: Exception, where: Path) -> str:
    """Where in the plugin the error happened."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(str(where)):
            found = f", {file} line {trace.tb_lineno}"
        trace = trace.tb_next
    return found
