"""What the package takes from megatron-core and Transformer Engine, read from its source."""

from __future__ import annotations

import ast
import importlib
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megaponder"
FOREIGN = ("megatron", "transformer_engine", "fused_weight_gradient_mlp_cuda")


@lru_cache
def sources() -> dict[str, list[ast.AST]]:
    """All nodes of the syntax trees of the package by path, but of the modelling file, which stands alone."""
    paths = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "modeling_megaponder.py"]
    return {str(p.relative_to(ROOT)): list(ast.walk(ast.parse(p.read_text()))) for p in paths}


@lru_cache
def imports() -> dict[str, tuple[set[str], set[str]]]:
    """Foreign module -> what is imported of it ("the module" for itself), and the subpackages that do so."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path, nodes in sources().items():
        package = Path(path).parts[1].removesuffix(".py")
        for node in nodes:
            names: list[tuple[str, str]] = []
            if isinstance(node, ast.Import):
                names = [(a.name, "the module") for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [(node.module, a.name) for a in node.names]
            for module, name in names:
                if module.partition(".")[0] in FOREIGN:
                    imported, packages = found.setdefault(module, (set(), set()))
                    imported.add(name)
                    packages.add(package)
    return found


PUBLIC = {"_exit", "_replace"}
"""Documented in spite of their names: os._exit, and that of named tuples."""
WHERE = {"engine", "backbone", "data", "checkpoint", "training"}
"""Subpackages that use megatron-core, Transformer Engine and PyTorch."""


OURS = {"self", "cls", "out"}
"""Names of objects of our own classes in assignments."""


@lru_cache
def private_names() -> set[tuple[str, str]]:
    """(path, name) of each `x._name` or `f(_name=...)` that nothing in the package defines: somebody else's."""
    trees = {path: nodes for path, nodes in sources().items() if Path(path).parts[1] in WHERE}
    own = {name for nodes in trees.values() for name in _defined(nodes)} | PUBLIC
    found = set()
    for path, nodes in trees.items():
        for node in nodes:
            name = node.attr if isinstance(node, ast.Attribute) else node.arg if isinstance(node, ast.keyword) else None
            if name and name.startswith("_") and not name.startswith("__") and name not in own:
                found.add((path, name))
    return found


def _defined(nodes: list[ast.AST]) -> set[str]:
    """Functions, classes and whatever a name or an attribute is assigned to by plain assignment."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            for part in (p for target in targets for p in ast.walk(target)):
                if isinstance(part, ast.Name):
                    names.add(part.id)
                elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in OURS:
                    names.add(part.attr)
    return names


@lru_cache
def overridden() -> set[tuple[str, str, str]]:
    """(path, base class, method) of methods that replace one of a megatron-core class.

    Classes of Transformer Engine, which needs a GPU, count as having every method but `__init__`.
    """
    found = set()
    for path, nodes in sources().items():
        origin = {
            a.asname or a.name: node.module
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in FOREIGN
            for a in node.names
        }
        for node in nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                if not (isinstance(base, ast.Name) and base.id in origin):
                    continue
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and _has(origin[base.id], base.id, method.name):
                        found.add((path, base.id, method.name))
    return found


def _has(module: str, name: str, method: str) -> bool:
    if method == "__init__":
        return False
    if "transformer_engine" in module:
        return True
    return hasattr(getattr(importlib.import_module(module), name), method)


@lru_cache
def patches() -> set[tuple[str, str]]:
    """(path, "module.name") of every assignment to an attribute of an imported foreign module or class."""
    found = set()
    for path, nodes in sources().items():
        names = {
            a.asname or a.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in FOREIGN
            for a in node.names
        }
        for node in nodes:
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id in names
                ):
                    found.add((path, f"{target.value.id}.{target.attr}"))
    return found
