"""Real text available on every machine: the Python standard library, as two corpora.

`code` holds the library's modules without their docstrings, `docs` those docstrings and the language reference that
`help()` shows, so that no sentence is in both.  Files are taken in a fixed order: the same Python gives the same bytes.
"""

from __future__ import annotations

import ast
import os
import sysconfig
from pathlib import Path

import orjson

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
SHORTEST_DOCUMENT = 200
"""Characters; shorter documents teach a model little except that texts end."""


FEWEST_DOCUMENTS = 30
"""So that a validation part of a few percent has at least one."""


def gather(folder: Path, max_code_bytes: int) -> dict[str, Path]:
    """Writes `code.jsonl` and `docs.jsonl`; paths by name.

    From the first modules that hold `max_code_bytes` of code and are `FEWEST_DOCUMENTS` at least.
    """
    folder.mkdir(parents=True, exist_ok=True)
    code: list[str] = []
    docs: list[str] = []
    size = documents = 0
    for module in map(split_module, library_modules()):
        if module is not None:
            code.append(module[0])
            docs.append(module[1])
            size += len(module[0].encode())
            documents += len(module[0]) >= SHORTEST_DOCUMENT
        if size >= max_code_bytes and documents >= FEWEST_DOCUMENTS:
            break
    return {
        "code": write_jsonl(folder / "code.jsonl", code),
        "docs": write_jsonl(folder / "docs.jsonl", language_reference() + docs),
    }


def library_modules() -> list[Path]:
    """The standard library's source files, without tests, sorted so that packages mix with plain modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]
    return sorted(found, key=lambda path: (path.name, str(path)))


def split_module(path: Path) -> tuple[str, str] | None:
    """A module's source without docstrings, and its docstrings; None for files that are not valid UTF-8 Python."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None
    lines: list[str | None] = list(source.splitlines())
    docs = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        docs.append(text if isinstance(node, ast.Module) else f"{node.name}: {text}")
        statement = node.body[0]
        for number in range(statement.lineno - 1, statement.end_lineno or statement.lineno):
            lines[number] = None
    code = "\n".join(line for line in lines if line is not None)
    return code.strip() + "\n", "\n\n".join(docs) + "\n"


def language_reference() -> list[str]:
    """The chapters behind `help("if")`, `help("STRINGS")` and so on."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return []
    return [topics[name].strip() + "\n" for name in sorted(topics)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    """One `{"text": ...}` a line for every document that is long enough; the file appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as out:
        for text in documents:
            if len(text) >= SHORTEST_DOCUMENT:
                out.write(orjson.dumps({"text": text}) + b"\n")
    os.replace(partial, path)
    return path
