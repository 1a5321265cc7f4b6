"""The one rule that reads what the fields declare."""

from __future__ import annotations

from megaponder.config.fields import all_fields, value_of
from megaponder.config.rules.case import Case


def numbers_are_in_range(c: Case, sections: tuple[str, ...] = ("",)) -> None:
    """Each number lies where it means something; checked before all that divides or loops."""
    for name, field in all_fields().items():
        if name.startswith(sections):
            field.declared.check(name, value_of(c.cfg, name), field.default)
