"""`benchmarks.compare_commits`: what it finds, what it says, and how it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare_commits
from benchmarks.compare_commits import ROOT, cases, main, report
from megaponder.ponder.registry import methods


def test_every_method_has_a_case() -> None:
    tested = {method for _, method, _ in compare_commits.METHODS.values()}
    assert {name for name, cls in methods().items() if cls.__module__.startswith("megaponder.")} <= tested
    assert len(cases(everything=True)) > 2 * len(cases(everything=False))
    assert {case["lines"][-1][0] for case in cases(everything=False)} == {1, 2}


def test_a_changed_number_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Another epsilon of the optimizer: the first step is the same, what comes after it is not."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", "*.npz", "*.xz")
    for name in ("megaponder", "tests"):
        shutil.copytree(ROOT / name, tmp_path / "changed" / name, ignore=ignored)
    schema = tmp_path / "changed" / "megaponder" / "config" / "schema.py"
    text = schema.read_text()
    assert text.count("eps: float = declare(1e-8") == 1
    schema.write_text(text.replace("eps: float = declare(1e-8", "eps: float = declare(1e-3"))
    assert main([str(ROOT), str(tmp_path / "changed"), "--only", "vanilla"]) == 1
    out = capfd.readouterr().out
    assert "step 2, loss" in out and "step 3, grad_norm" in out and "step 1, loss" not in out
    assert "in 1 of 2 cases" in out, "the dataset is the same"


@pytest.mark.parametrize(
    ("a", "b", "code", "words"),
    [
        ({"loss": 1.0, "text": "x"}, {"loss": 1.0, "text": "x", "new": 2.0}, 0, "1 cases, 2 values: equal."),
        ({"loss": 1.0}, {"loss": 1.0 + 1e-12}, 1, "1.0e-12"),
        ({"loss": 1.0}, {}, 1, "1 of 1 values differ"),
        ({"text": "x"}, {"text": "y"}, 1, "case  text   x  y"),
        ({"loss": float("nan")}, {"loss": 1.0}, 1, "nan"),
        ({"failed": "why"}, {"failed": "why"}, 1, "why"),
        ({"failed": "x: there is no such method"}, {"loss": 1.0}, 0, "Not in A: case"),
        ({"loss": 1.0, "aux": 1.0}, {"failed": "why"}, 1, "1 of 2 values differ"),
    ],
)
def test_what_is_reported(
    a: dict[str, Any], b: dict[str, Any], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report({"case": a}, {"case": b}, 0.0) == code
    assert words in capsys.readouterr().out


def test_a_tolerance_is_relative(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = {"case": {"x": 100.0, "y": 1.0}}, {"case": {"x": 100.5, "y": 1.2}}
    assert report(a, b, 0.01) == 1
    assert "y" in (told := capsys.readouterr().out) and "1 of 2 values differ" in told
    assert report(a, b, 0.3) == 0
    assert "equal within 0.3" in capsys.readouterr().out


def test_speeds_are_compared_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"old": {"x": [100.0, 90.0], "y": [50.0, 50.0]}, "new": {"x": [97.0, 99.0], "y": [48.0, 47.0]}}
    for name in rates:
        (tmp_path / name / "megaponder").mkdir(parents=True)
    rounds = {"old": 0, "new": 0}

    def measured(words: list[str], cwd: Path, env: dict[str, str]) -> None:
        assert words[1:4] == ["-m", "benchmarks.training", "methods"] and env["PYTHONPATH"].startswith(str(cwd))
        rows = [
            {"name": row, "tokens_per_second_per_gpu": values[rounds[cwd.name]]}
            for row, values in rates[cwd.name].items()
        ]
        rounds[cwd.name] += 1
        (Path(words[-1]) / "training-methods.json").write_text(json.dumps([*rows, {"name": "z", "error": "no memory"}]))

    monkeypatch.setattr(subprocess, "run", measured)
    trees = [str(tmp_path / name) for name in rates]
    assert main([*trees, "--gpu", "methods", "--rounds", "2"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in out[2:]] == [["99", "0.990"], ["0.960", "<"]]
    rounds = {"old": 0, "new": 0}
    assert main([*trees, "--gpu", "methods", "--least", "0.95"]) == 0
