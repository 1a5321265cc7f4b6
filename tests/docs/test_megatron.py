"""docs/megatron.md lists every import, private part, replaced method and patch of the libraries below us."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from megaponder.engine import cuda_on_cpu
from tests.docs import foreign
from tests.test_repository import project

TEXT = (foreign.ROOT / "docs" / "megatron.md").read_text()
DEEPSPEED = (foreign.ROOT / "docs" / "deepspeed.md").read_text()
PINS = (foreign.ROOT / "constraints.txt").read_text().splitlines()
cuda_on_cpu.install()


def table(heading: str, text: str = TEXT) -> list[list[str]]:
    """Cells of the rows under a heading, without the two lines of the table's head."""
    part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_range_of_versions_is_that_of_the_project() -> None:
    (required,) = (name for name in project()["dependencies"] if name.startswith("megatron-core"))
    assert f"`{required}`" in TEXT
    _, oldest, newest = next(row for row in table("Versions") if row[0] == "megatron-core")
    allowed = Requirement(required).specifier
    assert oldest in allowed and newest in allowed and f"megatron-core=={oldest}" in PINS
    assert version("megatron-core") in allowed


def test_imports_are_those_of_the_package() -> None:
    rows = table("What is imported")
    assert all(reason for *_, reason in rows)
    listed = {
        names(module)[0]: ({name.strip("`") for name in imported.split(", ")}, set(names(packages)))
        for module, imported, packages, _ in rows
    }
    assert len(listed) == len(rows)
    assert listed == foreign.imports()


def rows() -> list[tuple[str, list[str]]]:
    heading = "What is private, replaced or patched"
    return [(names(file)[0], names(what)) for file, what, _, _ in table(heading) + table(heading, DEEPSPEED)]


def test_every_private_name_replaced_method_and_patch_is_listed() -> None:
    listed = {(file, what) for file, all_of in rows() for what in all_of}
    used = foreign.private_names() - {(file, what.rpartition(".")[2]) for file, what in listed}
    assert used == set()
    replaced = {(file, f"{base}.{method}") for file, base, method in foreign.overridden()}
    assert (replaced | foreign.patches()) - listed == set()


@pytest.mark.parametrize(("file", "what"), [(file, what) for file, all_of in rows() for what in all_of])
def test_what_is_listed_is_used_there(file: str, what: str) -> None:
    words = set(re.findall(r"\w+", (foreign.ROOT / file).read_text()))
    assert set(re.findall(r"\w+", what)) <= words


def test_the_search_finds_what_is_known_to_be_there() -> None:
    assert "SelfAttention" in foreign.imports()["megatron.core.transformer.attention"][0]
    assert any(name == "_communicate" for _, _, name in foreign.overridden())
    assert any(name == "_quantizer" for _, name in foreign.private_names())
    assert len(foreign.patches()) >= 4
