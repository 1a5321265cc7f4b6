"""The tables of docs/configuration.md, made from the schema: section by section what every field declares.

python -m megaponder.config.pages docs/configuration.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from megaponder.config.fields import Field, all_fields, sections
from megaponder.config.load import show
from megaponder.config.presets import PRESETS

MARK = "<!-- Below: made by `python -m megaponder.config.pages docs/configuration.md` from the schema; edit that. -->\n"


def row(field: Field) -> str:
    """The page's row for a field."""
    cells = (
        f"`{field.name}`",
        field.legal,
        f"`{show(field.default)}`",
        field.declared.resume,
        " ".join(field.doc.split()),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def tables() -> str:
    """Markdown of all fields and of the presets."""
    fields = list(all_fields().values())
    head = ["| field | legal | default | at resume | meaning |", "|---|---|---|---|---|"]
    text = [*head, *(row(f) for f in fields if "." not in f.name)]
    for name, cls in sections().items():
        text += ["", f"## {name}", "", *(cls.__doc__ or "").strip().splitlines(), "", *head]
        text += [row(f) for f in fields if f.name.startswith(f"{name}.")]
    names = ", ".join(f"`{name}`" for name in PRESETS)
    return "\n".join([*text, "", "## Presets", "", f"`model.preset` accepts {names}.", ""])


def current(page: str) -> str:
    """The page with the part below the mark regenerated."""
    above, mark, _ = page.partition(MARK)
    if not mark:
        raise ValueError(f"the page lacks its mark: {MARK}")
    return f"{above}{MARK}\n{tables()}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(current(path.read_text()))
