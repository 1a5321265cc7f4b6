"""What is told of a run that was killed and went on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.interrupted import figure, report, summary
from megaponder.errors import UserError


def series(steps: range, moved: float = 0.0) -> dict[int, dict[str, Any]]:
    held = {6: {"validation_loss": 2.5 + moved}}
    return {s: {"step": s, "loss": 4.0 * (1 + moved * (s > 3))} | held.get(s, {}) for s in steps}


def test_differences_are_told_for_the_steps_before_and_after(tmp_path: Path) -> None:
    found = summary(series(range(1, 7)), series(range(1, 7), 1e-3), resumed=3)
    assert found["largest"]["before"] == 0 and found["largest"]["after"] == pytest.approx(1e-3)
    assert found["validation"] == [(6, 2.5, 2.501)]
    found |= {
        "name": "tiny", "command": "command", "layouts": ["pipeline=2", "tensor=2"], "processes": 2, "reached": 5,
        "resumed": 3, "exit_code": 69, "seconds_to_the_end": 1.5, "seconds_to_go_on": 9.0,
    }  # fmt: skip
    told = report(found, "here")
    assert "after step 5; the job had ended 1.5 s later with exit code 69." in told
    assert "went on from step 3, so 2 steps were done again; their first was done 9.0 s after its start" in told
    assert "| 1 to 3 | pipeline=2 | 0.0e+00 | 0.0e+00 |" in told and "| 4 to 6 | tensor=2 | 1.0e-03 | 1.0e-03 |" in told
    assert "| 6 | 2.500000 | 2.501000 |" in told
    figure(found, tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_a_missing_step_is_an_error_not_a_difference() -> None:
    with pytest.raises(UserError, match="different steps: 6 up to 6, and 5 up to 5"):
        summary(series(range(1, 7)), series(range(1, 6)), resumed=3)
