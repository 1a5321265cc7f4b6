"""The methods' pages in docs/methods, made from each method's folder: formula and choices from the docstring of its
training form, decoding from that of its decoding form, options from the docstrings of its `Options`, passes and costs
from the plan.

    python -m megaponder.ponder.pages docs/methods
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import sys
from pathlib import Path

from megaponder.config.fields import attribute_docs
from megaponder.ponder.base import Method, Pass, Shape
from megaponder.ponder.registry import build_method, decoding_module, methods

HEAD = "<!-- Made by `python -m megaponder.ponder.pages docs/methods` from the source; edit that. -->\n"


def page(cls: type[Method]) -> str:
    """Markdown page of a method."""
    module = inspect.getmodule(cls)
    assert module is not None and module.__doc__ is not None
    text = [HEAD, f"# {cls.name}\n", f"{cls.summary[0].upper()}{cls.summary[1:]}.\n", module.__doc__.strip()]
    text.append(f"\n## Decoding\n\n{_decoding(cls)}")
    text.append("\n## Options (`ponder.options`)\n")
    docs = {name: " ".join(doc.split()) for name, doc in attribute_docs(cls.Options).items()}
    defaults = cls.Options()
    rows = [
        f"| `{f.name}` | `{getattr(defaults, f.name)}` | {docs.get(f.name, '')} |"
        for f in dataclasses.fields(cls.Options)
    ]
    text.append("\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) if rows else "None.")
    plan = build_method(cls.name, {}, Shape("llama", 24, 1024)).passes(0, None)
    text.append("\n## Passes with the default options\n")
    text.append("\n".join(["| pass | rows per token | fed back |", "|---|---|---|", *map(_row, plan)]))
    kind = [
        ("tokens halt on their own", cls.halts),
        ("halted tokens can be left out of training (`ponder.skip_halted`)", cls.skips),
        ("keys and values pass from pass to pass", cls.keeps_kv),
        (f"{cls.rider_channels} value per row travels through all stages", cls.rider_channels > 0),
    ]
    if any(holds for _, holds in kind):
        text.append("\n" + "\n".join(f"* {what}" for what, holds in kind if holds))
    return "\n".join(text).rstrip() + "\n"


def _decoding(cls: type[Method]) -> str:
    """The decoding form's docstring; it is read, not imported, since importing needs transformers."""
    name = decoding_module(cls)
    if name is None:
        return "There is no decoding form: `generate` runs the training forward over the full text for every token."
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    (form,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    return ast.get_docstring(form) or ast.get_docstring(tree) or ""


def _row(p: Pass) -> str:
    back = "read out" if p.last else f"{p.feedback_slots} per token"
    return f"| {p.index} | {p.slots} | {back} |"


def pages() -> dict[str, str]:
    """File name -> text of every method that is shipped."""
    shipped = {n: c for n, c in methods().items() if c.__module__.startswith("megaponder.")}
    index = [HEAD, "# Methods\n", "| method | what it does |", "|---|---|"]
    index += [f"| [`{name}`]({name}.md) | {cls.summary} |" for name, cls in sorted(shipped.items())]
    return {"README.md": "\n".join(index) + "\n"} | {f"{name}.md": page(cls) for name, cls in shipped.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in pages().items():
        (folder / file).write_text(text)
