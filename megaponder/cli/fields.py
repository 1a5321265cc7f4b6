"""The list of all configuration fields, made from the schema."""

from __future__ import annotations

import shutil
import textwrap

from megaponder.config.fields import all_fields, sections
from megaponder.config.load import show

AT_RESUME = {
    "refused": "; cannot change at a resume",
    "warned": "; may change at a resume, with a warning",
    "free": "",
}


def print_fields() -> int:
    """Print name, default, legal values and meaning of every field, section by section."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    section = ""
    for field in all_fields().values():
        head = field.name.partition(".")[0]
        if head != section and head in sections():
            print(f"\n{head}: {sections()[head].__doc__}")
        section = head
        print(f"  {field.name} = {show(field.default)}  ({field.legal}{AT_RESUME[field.declared.resume]})")
        print(textwrap.fill(field.doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return 0
