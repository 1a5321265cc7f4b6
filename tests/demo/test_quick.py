"""`megaponder demo --quick`, whole: what a newcomer starts with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_all_steps_end_and_leave_what_they_promise(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "megaponder", "demo", "--quick", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert (out / "validation.png").stat().st_size > 1000 and "validation" in ended.stdout
    for name in ("vanilla", "ponderlm"):  # the second was killed half way and went on
        rows = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, rows[-1]["step"] + 1)) and len(rows) > 4
