"""`megaponder demo --quick`, whole: what a newcomer starts with."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megaponder.cli.main import main
from tests import forks

ROOT = Path(__file__).resolve().parents[2]


def test_all_steps_end_and_leave_what_they_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "demo"
    command = [forks.python(), "-m", "megaponder", "demo", "--quick", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert (out / "validation.png").stat().st_size > 1000 and "validation" in ended.stdout
    assert "the same embedding scale and initialisation" in ended.stdout
    for name in ("vanilla", "matched", "ponderlm"):  # the last was killed half way and went on
        rows = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, rows[-1]["step"] + 1)) and len(rows) > 4
    _compare_and_evaluate(out, tmp_path, capsys, monkeypatch)


def _compare_and_evaluate(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """README's way from two runs to a figure over FLOPs, and from an export to a table of perplexities."""
    text = (ROOT / "README.md").read_text().replace("demo-run", str(out))
    compare, evaluate = (re.search(f"^megaponder {name} .*", text, re.M) for name in ("compare", "eval"))
    assert compare is not None and evaluate is not None
    assert main([*compare[0].split()[1:], "--out", str(tmp_path / "figures")]) == 0
    assert "FLOPs" in capsys.readouterr().out and (tmp_path / "figures" / "compare.png").stat().st_size > 1000
    folder = tmp_path / "hf"
    monkeypatch.setattr(sys, "argv", ["convert_to_hf.py", str(out / "ponderlm"), str(folder)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "convert_to_hf.py"), run_name="__main__")
    assert ended.value.code == 0
    words = evaluate[0].replace(str(out / "hf"), str(folder)).split()[1:]
    assert main([*words, "--limit", "500"]) == 0
    table = capsys.readouterr().out
    assert "perplexity" in table and "| 1 pass     | together |" in table
