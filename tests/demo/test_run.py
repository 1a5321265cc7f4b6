"""What the demo refuses to replace, and what it says about steps that were trained twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from megaponder.demo.commands import Command
from megaponder.demo.run import MARKER, claim, repeated_steps
from megaponder.errors import UserError


def test_only_its_own_folder_is_replaced(tmp_path: Path) -> None:
    own = tmp_path / "own"
    claim(own)
    (own / "old.txt").write_text("x")
    claim(own)
    assert [p.name for p in own.iterdir()] == [MARKER]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="was not made by the demo"):
        claim(other)
    with pytest.raises(UserError, match="is a file"):
        claim(other / "thesis.tex")
    assert (other / "thesis.tex").read_text() == "x"


def test_repeated_steps_are_compared(tmp_path: Path) -> None:
    def write(name: str, losses: dict[int, float]) -> None:
        (tmp_path / name).write_text("".join(json.dumps({"step": s, "loss": x}) + "\n" for s, x in losses.items()))

    write("metrics.jsonl", {5: 4.0, 10: 3.0, 15: 2.0})
    assert "No logged step" in repeated_steps(tmp_path)
    write("metrics.superseded.jsonl", {10: 3.0})
    assert "exactly the same losses" in repeated_steps(tmp_path)
    write("metrics.superseded.jsonl", {10: 3.5})
    assert "differ by up to 5.0e-01" in repeated_steps(tmp_path)


def test_a_command_that_fails_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(tmp_path / "none.yaml")]
    with pytest.raises(UserError, match=r"`megaponder plan .*none.yaml` ended with exit code 2; its last lines above"):
        Command(Console(), words).wait()
    assert "there is no such file" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"exit code 2; it said: error: .*there is no such file"):
        Command(Console(), words, tmp_path / "log").wait()
    command = Command(Console(), ["plan", "--presets"])
    assert command.kill_when(lambda: False) is False, "it ended by itself"
