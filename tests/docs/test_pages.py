"""Pages and pictures that are made from the source are current, and examples of configurations are legal."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from megaponder.config import pages, yaml_file
from megaponder.config.fields import all_fields, sections
from megaponder.config.in_flight import _order
from megaponder.config.load import from_mapping

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_configuration_is_current() -> None:
    text = (DOCS / "configuration.md").read_text()
    assert pages.current(text) == text, "run: python -m megaponder.config.pages docs/configuration.md"


def test_every_field_is_in_it_and_explained() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.+) \| `.*` \| (.+) \|$", pages.tables(), re.MULTILINE)
    assert [name for name, _, _ in rows] == [*sorted(all_fields(), key=lambda name: "." in name)]
    assert all(kind.strip() and meaning.strip() for _, kind, meaning in rows)


def examples() -> list[tuple[str, str]]:
    """(page, YAML) of each indented block that begins with a section."""
    found = []
    for page in sorted(DOCS.glob("*.md")):
        for block in re.findall(r"(?:^ {4}.*\n)+", page.read_text(), re.MULTILINE):
            if re.match(rf" {{4}}({'|'.join(sections())}):\n", block):
                found.append((page.name, textwrap.dedent(block)))
    return found


@pytest.mark.parametrize(("page", "text"), examples())
def test_an_example_is_legal(page: str, text: str) -> None:
    from_mapping(yaml_file.parse(text, page))


def test_there_are_examples() -> None:
    assert {"configuration.md", "data.md"} <= {page for page, _ in examples()}


def test_the_picture_is_current_and_shows_the_order_of_the_schedule() -> None:
    sys.path.insert(0, str(DOCS / "pictures"))
    try:
        import passes
    finally:
        sys.path.remove(str(DOCS / "pictures"))
    assert passes.picture() == (DOCS / "pictures" / "passes.svg").read_text()
    for stage in range(passes.STAGES):
        drawn = [(forward, p) for forward, p, _ in passes.order(stage)]
        assert drawn == list(_order(stage, passes.STAGES, passes.PASSES, passes.BATCHES, passes.GROUP))
    work = Counter(work for _, work in passes.times())
    assert len(work) == 2 * passes.PASSES * passes.BATCHES and set(work.values()) == {passes.STAGES}


def test_a_page_without_its_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="mark"):
        pages.current("# Configuration\n")


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Mine\n\n{pages.MARK}old")
    subprocess.run([sys.executable, "-m", "megaponder.config.pages", str(page)], check=True)
    assert page.read_text() == f"# Mine\n\n{pages.MARK}\n{pages.tables()}"


def test_every_folder_of_the_package_is_on_the_map() -> None:
    text = (DOCS / "architecture.md").read_text().partition("## Where to look")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    there = {p.parent.name for p in (ROOT / "megaponder").glob("*/__init__.py")}
    assert listed == there
