"""The modelling code of an export: the files of `megaponder.decoding` and one method's decoding form, side by side.

    modeling_megaponder.py   what config.json names: the model class with its method
    configuration.py, cache.py, passes.py, backbone.py, method.py, model.py ... from `megaponder/decoding`
    method_NAME.py           from NAME/decoding.py of the method, and those of the same package that it imports

`from megaponder.decoding.cache import ...` becomes `from .cache import ...`; otherwise the files are copied unchanged,
so an installation of this version can tell whether a folder's code is its own.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

from megaponder.errors import UserError
from megaponder.ponder import registry

if TYPE_CHECKING:
    from megaponder.decoding.method import DecodingMethod

ENTRY = "modeling_megaponder"
CONFIGURATION = "configuration"
_IMPORT = re.compile(r"^from (\.?[\w.]+) import ", re.MULTILINE)
_ENTRY = '''"""A pondering language model for `transformers`, loaded with `trust_remote_code=True`: method {method}.

    configuration   fields of config.json
    cache, slots    keys and values of all passes
    passes, packed  what the rows of a pass read
    paged           the same in `generate_batch`
    backbone        embedding, layers, norm
    method          base of a method's decoding form
    {module:15} that of {method}
    model           the model with its head, `forward` and `generate`
    headless        the model without it, for engines
"""

from __future__ import annotations

from .configuration import MegaponderConfig
from .headless import PonderModel
from .{module} import {cls}
from .model import PonderForCausalLM
{all}
__all__ = ["MegaponderConfig", "MegaponderForCausalLM", "MegaponderModel"]


class MegaponderForCausalLM(PonderForCausalLM):
    """A pondering language model with its head, by method {method}."""

    decoding = {cls}
    _auto_class = "AutoModelForCausalLM"  # save_pretrained writes this code as well


class MegaponderModel(PonderModel):
    """The same without its head, for engines that keep keys and values themselves."""

    decoding = {cls}
'''


def files(method: str) -> dict[str, str]:
    """Names and texts of the modelling files of an export with this method."""
    form = decoding_class(method)
    names = {
        form.__module__: f"method_{method}",
        "megaponder.decoding.model": "model",
        "megaponder.decoding.headless": "headless",
    }
    out: dict[str, str] = {}
    left = list(names)
    while left:
        module = left.pop()
        text = _source(module).read_text(encoding="utf-8")
        for imported in sorted(set(_IMPORT.findall(text))):
            if imported.split(".")[0] not in ("", "megaponder", module.split(".")[0]):
                continue
            target = importlib.util.resolve_name(imported, module.rpartition(".")[0])
            if target not in names:
                names[target] = _flat(target)
                left.append(target)
            text = text.replace(f"from {imported} import ", f"from .{names[target]} import ")
        if (name := names[module]) in out:
            raise UserError(f"ponder.method = {method!r}: two files of its code are called {name}.py; rename one.")
        out[name] = text
    if ENTRY in out:
        raise UserError(f"ponder.method = {method!r}: a file of its code is called {ENTRY}.py; rename it.")
    # early releases of transformers copy only the files that the first one imports
    named = "".join(f"from .{name} import __doc__ as _  # noqa: F401\n" for name in sorted(out))
    out[ENTRY] = _ENTRY.format(method=method, module=f"method_{method}", cls=form.__name__, all=named)
    return {f"{name}.py": text for name, text in sorted(out.items())}


def _flat(module: str) -> str:
    """A module's name in an export folder."""
    folder, _, last = module.rpartition(".")
    return f"method_{folder.rpartition('.')[2]}" if last == "decoding" else last


def _source(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


def decoding_class(method: str) -> type[DecodingMethod]:
    """The decoding form of a method; UserError if there is none."""
    if (form := registry.decoding_class(method)) is None:
        raise UserError(
            f"ponder.method = {method!r}: it has no decoding form, so it cannot be exported; add a file decoding.py "
            "beside its training form."
        )
    return form
