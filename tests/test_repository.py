"""Rules of the house that a machine can check: sizes, layers, declared dependencies, start-up without torch."""

from __future__ import annotations

import ast
import graphlib
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megaponder"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LAYERS = [
    {"config", "decoding", "errors", "files", "processes", "ranks"},
    {"ponder", "backbone", "data"},
    {"engine"},
    {"checkpoint", "plan", "monitor"},
    {"training", "inference", "export"},
    {"demo", "compare", "lineage", "upcycle"},
    {"cli", "__main__"},
]
"""From below.  A module imports from its own layer or from those below, in functions and for type checks too."""
DISTRIBUTIONS = {"megatron": "megatron-core", "ruamel": "ruamel.yaml", "huggingface_hub": "transformers"}
"""Import names that differ from their distribution, or that come with another one."""
PROBED = {"transformer_engine", "fused_weight_gradient_mlp_cuda", "pydoc_data", "triton"}
"""Used where they are there; never required."""


def imports(path: Path, top_only: bool) -> list[str]:
    """Dotted names that a file imports, at its top level only or anywhere."""
    tree = ast.parse(path.read_text())
    nodes = list(tree.body) if top_only else list(ast.walk(tree))
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module)
    return names


def layer(name: str) -> int | None:
    return next((i for i, layer in enumerate(LAYERS) if name in layer), None)


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!;]", requirement)[0]).lower()


def test_files_stay_small() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in SOURCES}
    assert {name: n for name, n in lengths.items() if n > 500} == {}
    assert statistics.median(lengths.values()) < 180


def own_imports(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere: in functions and for type checks too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for name in node.names:
                module = f"{node.module}.{name.name}"
                is_module = (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
                found.add(module if is_module else node.module)
    return {name for name in found if name.startswith("megaponder.")}


def test_imports_go_downwards() -> None:
    upwards = []
    for path in SOURCES:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for name in own_imports(path):
            here, there = layer(own), layer(name.split(".")[1])
            assert here is not None and there is not None, f"{own} or {name} is in no layer"
            if there > here:
                upwards.append(f"{path.relative_to(ROOT)} imports {name}")
    assert upwards == []


def test_no_module_imports_itself_on_a_detour() -> None:
    graph = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): own_imports(p) for p in SOURCES
    }
    sorter = graphlib.TopologicalSorter({name: needs - {name} for name, needs in graph.items()})
    sorter.prepare()  # CycleError names the circle


def imported_at_the_start(path: Path) -> set[str]:
    """What importing a file imports: nothing in functions or for type checks."""
    found, left = set(), list(ast.parse(path.read_text()).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Try):
            left += [*node.body, *(n for handler in node.handlers for n in handler.body)]
    return found


def test_a_start_of_training_does_without_transformers() -> None:
    methods = (PACKAGE / "ponder" / "methods").glob("*/training.py")
    left = [PACKAGE / "training" / name for name in ("job.py", "loop.py")] + list(methods)
    reached = {}  # file: the one that imports it
    heavy = []
    while left:
        path = left.pop()
        for name in imported_at_the_start(path):
            if name.split(".")[0] in ("transformers", "huggingface_hub", "lm_eval"):
                heavy.append(f"{path.relative_to(ROOT)}, imported by {reached.get(path)}")
            there = ROOT.joinpath(*name.split(".")).with_suffix(".py")
            if there.is_file() and there not in reached:
                reached[there] = path.relative_to(ROOT)
                left.append(there)
    assert len(reached) > 100 and heavy == []


def test_every_import_is_a_declared_dependency() -> None:
    data = project()
    wanted = [*data["dependencies"], *(r for extra in data["optional-dependencies"].values() for r in extra)]
    declared = {canonical(r) for r in wanted}
    unknown = set()
    for path in SOURCES:
        for name in imports(path, top_only=False):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top == "megaponder" or top in PROBED:
                continue
            if canonical(DISTRIBUTIONS.get(top, top)) not in declared:
                unknown.add(f"{path.relative_to(ROOT)}: {top}")
    assert unknown == set()


def test_every_dependency_has_a_tested_version() -> None:
    data = project()
    pinned = {
        canonical(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in ("", "#")
    }
    extras = data["optional-dependencies"]
    wanted = [*data["dependencies"], *extras["export"], *extras["parquet"], *extras["docs"], *extras["dev"]]
    assert {canonical(r) for r in wanted} - pinned - {"megaponder"} == set()
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().split()


def test_the_gpu_image_has_the_tested_versions() -> None:
    lines = (ROOT / "docker" / "gpu-requirements.txt").read_text().splitlines()
    listed = [line for line in lines if line[:1] not in ("", "#")]
    tested = {line.partition(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(listed) <= tested
    data = project()
    wanted = {canonical(r) for r in (*data["dependencies"], *data["optional-dependencies"]["export"])}
    assert {canonical(r) for r in listed} == wanted - {"torch", "megatron-core", "numpy"}, "NVIDIA's, and one by name"


@pytest.mark.parametrize(
    "module",
    ["megaponder.config.load", "megaponder.cli.main", "megaponder.cli.configuration", "megaponder.data.prepare"],
)
def test_light_modules_do_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_of_every_command_does_without_torch() -> None:
    code = "import sys; from megaponder.cli.main import build_parser; build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
