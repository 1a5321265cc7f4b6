"""The site builds without a broken link, and fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADED = {
    "link": "href",
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "use": "href",
}
"""Elements whose target a browser fetches by itself."""


class Fetched(HTMLParser):
    """Targets that a browser fetches when it opens the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get(LOADED.get(tag, ""))
        if target and dict(attrs).get("rel") not in ("canonical", "prev", "next"):
            self.found.append(target)


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    fetched = {target for page in pages for target in Fetched(page.read_text()).found}
    assert len(pages) > 20 and any(t.endswith(".css") for t in fetched) and any(t.endswith(".js") for t in fetched)
    assert {t for t in fetched if re.match(r"(\w+:)?//", t)} == set()
    styles = "".join(p.read_text() for p in site.rglob("*.css")) + "".join(p.read_text() for p in pages)
    assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)'\"]*", styles) == []


def test_pages_are_there_and_linked(site: Path) -> None:
    front = (site / "index.html").read_text()
    for page in ("tour", "architecture", "methods/index", "configuration", "contributing", "reference/ponder"):
        assert (site / f"{page}.html").is_file() and f'href="{page}.html"' in front, page
    assert '<img alt="' in (text := (site / "architecture.html").read_text()) and "pictures/passes.svg" in text


@pytest.mark.parametrize(
    "name", ["ponder.base.Method.enter", "config.schema.TrainConfig", "inference.generate.generate"]
)
def test_the_reference_has_the_interfaces(site: Path, name: str) -> None:
    page = site / "reference" / f"{name.partition('.')[0]}.html"
    assert f'id="megaponder.{name}"' in page.read_text()


@pytest.mark.parametrize(("link", "fine"), [("more.md#part", True), ("nowhere.md", False), ("more.md#nowhere", False)])
def test_a_broken_link_is_an_error(tmp_path: Path, link: str, fine: bool) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Front\n\n[there]({link})\n")
    (tmp_path / "docs" / "more.md").write_text("# More\n\n## Part\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\nhooks: []\nplugins: []\nnav: [index.md, more.md]\n")
    done = build(tmp_path / "site", config)
    said = done.stdout + done.stderr
    assert (done.returncode == 0) is fine and (fine or "nowhere" in said), said


@pytest.mark.parametrize(
    ("here", "written", "shown"),
    [
        ("index.md", "[a](docs/faults.md)", "[a](faults.md)"),
        ("index.md", "[a](docs/faults.md#files)", "[a](faults.md#files)"),
        ("index.md", "[a](benchmarks/results/methods.md)", "a"),
        ("index.md", "[a](benchmarks/nowhere.md)", "[a](benchmarks/nowhere.md)"),
        ("faults.md", "[a](../README.md)", "[a](index.md)"),
        ("methods/loop.md", "[a](../../CHANGELOG.md)", "[a](../changelog.md)"),
        ("faults.md", "![a](watch.png) and [b](https://semver.org/)", "![a](watch.png) and [b](https://semver.org/)"),
        ("faults.md", "[a](#files)", "[a](#files)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(here: str, written: str, shown: str) -> None:
    hook = runpy.run_path(str(ROOT / "docs" / "site.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri=here))
    assert hook(written, page) == shown
