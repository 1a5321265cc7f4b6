"""Whom a rank that stands still names in the log: again if it is another one, or has died since."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from megaponder.errors import LostRank
from megaponder.monitor.jsonl import read
from megaponder.monitor.phases import PhaseClock
from megaponder.training import heartbeat
from megaponder.training.heartbeat import Heartbeat


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    """Of two ranks in step 3, as if each were a process of its own."""
    clock, made = PhaseClock(lambda: 0.0), []
    clock.enter("agree", 3)
    monkeypatch.setattr(heartbeat.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(heartbeat.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(heartbeat, "on_first_rank", lambda action: None)
    for rank in range(2):
        monkeypatch.setattr(heartbeat.dist, "get_rank", lambda rank=rank: rank)
        made.append(Heartbeat(tmp_path, clock, 6000.0, 60000.0))
    return made


def test_a_rank_that_an_error_ends_says_so_at_once(ranks: list[Heartbeat]) -> None:
    """Its process is still there when its connections close, and may be on another node."""
    first, second = ranks
    with pytest.raises(LostRank, match=r"rank 1 on .*, last seen 0 s ago in agree of step 3, has ended"), first:
        with pytest.raises(ValueError), second:
            raise ValueError("a bug")
        raise RuntimeError("gloo: Connection closed by peer")


def test_a_rank_that_has_died_since_is_named_again(
    ranks: list[Heartbeat], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = ranks[0]
    mine._write()

    def told(step: int) -> str:
        said = {"rank": 1, "host": socket.gethostname(), "pid": other.pid, "step": step, "phase": "data"}
        (mine.folder / "00001.json").write_text(json.dumps(said))
        mine._tell(mine._clock.now, 7000.0)
        return capsys.readouterr().err

    with subprocess.Popen(["sleep", "600"]) as other:
        assert "no progress for 7000 s: the others wait for rank 1 on " in told(3)
        assert told(3) == ""
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # nobody has waited for it yet
        assert "in data of step 3, has ended" in told(3) and told(3) == ""
    assert [row["event"] for row in read(tmp_path / "faults.jsonl")] == ["hang", "hang"]
