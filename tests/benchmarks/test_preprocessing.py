"""The preprocessing benchmark runs, and its contenders write the same bytes."""

import json
import subprocess
import sys
from pathlib import Path

from tests.data_pipeline.make import jsonl

ROOT = Path(__file__).parents[2]


def test_small_run(tmp_path: Path) -> None:
    corpus = jsonl(tmp_path / "a.jsonl", [f"the cat {i} sat on the mat" for i in range(50)])
    output = tmp_path / "out" / "new"
    command = [sys.executable, "-m", "benchmarks.preprocessing", str(corpus), "--output", str(output)]
    subprocess.run([*command, "--rounds", "1", "--workers", "1", "1"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    assert sorted(p.name for p in output.iterdir()) == ["preprocessing.json", "preprocessing.md"]
    result = json.loads((output / "preprocessing.json").read_text())
    assert set(result["contenders"]) == {"one by one", "prepare, 1 worker"}
    assert "prepare, 1 worker" in (output / "preprocessing.md").read_text()
