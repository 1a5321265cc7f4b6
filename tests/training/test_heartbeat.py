"""Whom a rank that stands still names in the log: again if it is another one, or has died since."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from megaponder.monitor.jsonl import read
from megaponder.monitor.phases import PhaseClock
from megaponder.training import heartbeat
from megaponder.training.heartbeat import Heartbeat


def test_a_rank_that_has_died_since_is_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(heartbeat.dist, "get_world_size", lambda: 2)
    clock = PhaseClock(lambda: 0.0)
    clock.enter("agree", 3)
    mine = Heartbeat(tmp_path, clock, 6000.0, 60000.0)
    mine._write()

    def told(step: int) -> str:
        said = {"rank": 1, "host": socket.gethostname(), "pid": other.pid, "step": step, "phase": "data"}
        (mine.folder / "00001.json").write_text(json.dumps(said))
        mine._tell(clock.now, 7000.0)
        return capsys.readouterr().err

    with subprocess.Popen(["sleep", "600"]) as other:
        assert "no progress for 7000 s: the others wait for rank 1 on " in told(3)
        assert told(3) == ""
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # nobody has waited for it yet
        assert "in data of step 3, has ended" in told(3) and told(3) == ""
    assert [row["event"] for row in read(tmp_path / "faults.jsonl")] == ["hang", "hang"]
