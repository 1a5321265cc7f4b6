"""A run on two ranks: start, watch, stop by a signal, requeue, kill -9 in a save, another layout, finish."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megaponder.checkpoint import folder, manifest
from megaponder.cli.main import main
from megaponder.errors import REQUEUE
from tests.distributed import Workers
from tests.training.conftest import Base
from tests.training.test_resume import assert_overlays

SECRET = "kept-in-the-environment-7d1f"
PATIENCE = {"hang": 600.0, "deadline": 1200.0}


def start(base: Base, **changes: Any) -> Workers:
    """The same command in the same run folder on two ranks."""
    job = {"run": str(base.root / "story"), "data": base.data}
    return Workers("tests.training.fault_workers:command", 2, PATIENCE | job | changes)


def wait_for(what: Any, workers: Workers, seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end and None in workers.poll(), workers.output()
        time.sleep(0.001)


def unfinished(root: Path) -> list[Path]:
    return sorted(root.glob(".step_*.tmp"))


def test_the_whole_story(base: Base, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    run = base.root / "story"
    root = run / "checkpoints"

    first = start(base, parallel__pipeline=2, held=4)
    wait_for((base.root / "story.held").exists, first)
    assert main(["watch", str(run), "--once"]) == 0
    board = capsys.readouterr().out
    assert "of 8 (" in board and "loss: training" in board
    os.kill(first.pids[0], signal.SIGUSR1)
    (base.root / "story.go").touch()  # step 4 goes on, after which there is an evaluation
    assert first.join() == [0, 0], first.output()  # torchrun would take another code for a failure
    assert (base.root / "story.exit").read_text().split() == [str(REQUEUE)] * 2
    stopped = max(folder.published(root))
    assert f"Stopped by SIGUSR1 after step {stopped}; it is saved." in first.output() and stopped == 4

    second = start(base, parallel__pipeline=2, publishes=False)
    wait_for(lambda: unfinished(root), second)
    second.kill()
    assert unfinished(root), "the kill came while a checkpoint was written"
    whole = folder.published(root)
    assert max(whole) >= stopped and all(manifest.damage(path) is None for path in whole.values())

    third = start(base, parallel__tensor=2)
    assert third.join() == [0, 0], third.output()
    assert f"Resuming from checkpoint {whole[max(whole)]}" in third.output()
    assert not unfinished(root) and max(folder.published(root)) == 8
    assert_overlays(base, "story")
    assert main(["watch", str(run), "--once"]) == 0
    assert "finished" in capsys.readouterr().out

    assert not any(SECRET in workers.output() for workers in (first, second, third))
    assert not [p for p in run.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
