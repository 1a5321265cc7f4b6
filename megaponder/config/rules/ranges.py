"""The one rule that reads what the fields declare."""

from __future__ import annotations

from megaponder.config.fields import all_fields, value_of
from megaponder.config.rules.case import Case


def numbers_are_in_range(c: Case, sections: tuple[str, ...] = ("",)) -> None:
    """Each number lies where it means something; checked before all that divides or loops."""
    # data.shuffle_seed may have been filled in from train.seed, which is then the field that somebody wrote
    for name, field in sorted(all_fields().items(), key=lambda named: named[0] == "data.shuffle_seed"):
        if name.startswith(sections):
            field.declared.check(name, value_of(c.cfg, name), field.default)
