"""Hooks of mkdocs.yml: pages that lie outside docs/, and links that leave it.

The same Markdown is read in the repository and on the site.  README.md is the site's first page; a link to a page goes
to that page, and a link to any other file of the repository, which the site does not carry, becomes plain text.  Links
to files that do not exist stay as they are, so that `mkdocs build --strict` refuses them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File of the repository -> page of the site."""
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the repository into links of the site."""
    here = page.file.src_uri
    source = {new: old for old, new in PAGES.items()}.get(here, f"docs/{here}")
    return _LINK.sub(lambda link: _translated(link, source, here), markdown)


def _translated(link: re.Match[str], source: str, here: str) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path in PAGES or path.startswith("docs/"):
        page = PAGES.get(path, path.removeprefix("docs/"))
        return f"[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"
    return text if (ROOT / path).exists() else link[0]
