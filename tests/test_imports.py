"""What runs on GPUs only imports names that exist: no test on a CPU would notice otherwise."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from megaponder.engine import cuda_on_cpu

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(p for folder in ("benchmarks", "tests/gpu", "tools") for p in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imported_names_exist(path: Path) -> None:
    cuda_on_cpu.install()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "megaponder":
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")  # a submodule, or an error that names it
