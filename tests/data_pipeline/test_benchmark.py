"""The preprocessing benchmark runs, and its contenders write the same bytes."""

import json
import subprocess
import sys
from pathlib import Path

from tests.data_pipeline.make import jsonl

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "preprocessing.py"


def test_small_run(tmp_path: Path) -> None:
    corpus = jsonl(tmp_path / "a.jsonl", [f"the cat {i} sat on the mat" for i in range(50)])
    output = tmp_path / "out" / "result"
    command = [sys.executable, str(SCRIPT), str(corpus), "--rounds", "1", "--workers", "1", "--output", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads(output.with_suffix(".json").read_text())
    assert set(result["contenders"]) == {"one by one", "prepare, 1 worker"}
    assert "prepare, 1 worker" in output.with_suffix(".md").read_text()
