"""The methods' pages are what the source says."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaponder.ponder.pages import pages

FOLDER = Path(__file__).parents[2] / "docs" / "methods"


@pytest.mark.parametrize("name", sorted(pages()))
def test_page_is_current(name: str) -> None:
    hint = "run: python -m megaponder.ponder.pages docs/methods"
    assert (FOLDER / name).read_text() == pages()[name], hint


def test_no_page_is_left_over() -> None:
    assert {p.name for p in FOLDER.iterdir()} == set(pages())


def test_every_option_is_explained() -> None:
    for name, text in pages().items():
        assert "| |\n" not in text.replace("|  |", "| |"), name


def test_the_worked_example_is_the_tested_one_and_short() -> None:
    root = Path(__file__).parents[2]
    files = sorted((root / "tests" / "ponder" / "halfway").glob("*.py"))
    assert [p.name for p in files] == ["decoding.py", "training.py"]
    for file in files:
        assert f"```python\n{file.read_text()}```" in (root / "CONTRIBUTING.md").read_text()
    assert sum(len(file.read_text().splitlines()) for file in files) <= 60
