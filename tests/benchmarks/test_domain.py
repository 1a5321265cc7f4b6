"""The recipe of a domain: its questions, its stages, its table."""

from __future__ import annotations

from pathlib import Path

from benchmarks.domain import LINES, STAGES, figure, likeness, questions, report
from tests.lineage import models
from tests.lineage.test_command import saved

ENTRY = "Nepal\n\nGeography\n\n" + "\n".join(f"Field {n}: part {n}: it is {n}" for n in range(2 * LINES + 3))


def test_questions_are_made_of_other_lines_each() -> None:
    found = list(questions(ENTRY))
    assert len(found) == 2 * LINES and len({one["instruction"] for one in found}) == len(found)
    for number, one in enumerate(found):
        n = number // LINES
        lines = one["input"].split("\n")
        assert lines == [f"Field {i}: part {i}: it is {i}" for i in range(n * LINES, (n + 1) * LINES)]
        name = one["instruction"].removeprefix("What does the entry say about ").removesuffix("?")
        assert f"{name}: {one['output']}" in lines
    assert not list(questions("a text\nwithout fields")) and not list(questions("Same: x\n" * LINES))


def test_the_table_and_the_figure(tmp_path: Path) -> None:
    base = {"targets": 9, "asked": 4, "right": 0, "tokens": 100, "domain": 5.0, "general": 4.0, "answers": 6.0}
    found = {"base": base} | {name: base | {"domain": 4.5, "right": 3, "awm": 0.98765} for name in STAGES}
    told = report("tiny", found, "command", "here")
    assert "| cpt-mixed | base | 50% domain, 50% general | 100 | 4.5000 (-0.500) | 4.0000 (+0.000) | " in told
    assert told.count("| 3 | 0.9877 |") == len(STAGES)
    assert "| base |  | general | 100 | 5.0000 | 4.0000 | 6.0000 | 0 | not measured |" in told
    figure(found, tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_how_far_a_stage_is_from_the_base(tmp_path: Path) -> None:
    """1 of the base itself, less of a model that moved, about 0 of another."""
    net = models.net()
    start = models.plain(net)
    made = {"base": start, "moved": models.noisy(start, 0.2), "other": models.plain(models.net(5))}
    for name, plain in made.items():
        net.load_state_dict(plain)
        saved(net, tmp_path / name, "llama")
    itself, moved, other = (likeness(tmp_path / "base", tmp_path / name) for name in made)
    assert abs(itself - 1) < 1e-9 and 0.9 < moved < 0.999 and abs(other) < 0.2
