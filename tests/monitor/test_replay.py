"""Rows from metrics.jsonl into the trackers: as if they had been there from the beginning."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megaponder.cli.main import main
from megaponder.config.load import dump
from megaponder.config.schema import RunConfig
from megaponder.monitor import identity


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "r"
    folder.mkdir()
    identity.start(folder)
    rows = [{"step": s, "sequences": s, "tokens": 8 * s, "loss": 4 / s, "ponder_mean_depth": 2.0} for s in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    dump(RunConfig(run=str(folder)), folder / "config.yaml")
    return folder


def test_tensorboard_shows_each_row_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):  # the second hides the first
        assert main(["replay", str(run), "--tensorboard"]) == 0
    assert "3 rows up to step 3" in capsys.readouterr().out
    events = event_accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/tokens", "ponder/mean_depth"}
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 4), (2, 2), (3, pytest.approx(4 / 3))]


def test_odd_rows_are_counted_and_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of a newer version, of a hand, and of a disk that has lost something; in every command that shows rows."""
    rows = [
        {"step": 4, "sequences": 4, "tokens": 32, "loss": 1.0, "of_tomorrow": 3.0, "ponder_new_pass[/b]": 1.0},
        {"step": 5, "sequences": 5, "tokens": 40, "loss": "low", "grad_norm": None, "mfu": [1], "passes": 10**400},
        {"step": 6, "sequences": 6, "tokens": 48, "total_steps": float("nan"), "step_seconds": float("inf")},
        {"step": 7, "sequences": 7, "tokens": 56, "ponder_active_passX": 1.0, "skipped_[bold]": True},
        {"step": True, "sequences": 8, "tokens": 64}, {"step": -1, "sequences": 8, "tokens": 64},
    ]  # fmt: skip
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.write('{"step": 8}\nrubbish\n' + "[" * 3_000_000 + '\n{"step": 9, "lo')
    for command in ("watch", "replay"):
        words = ["--once"] if command == "watch" else ["--tensorboard"]
        assert main([command, str(run), *words]) == 0, capsys.readouterr().err
        out = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "5 lines are not rows and were ignored." in out, out
        assert "not numbers were ignored: loss, grad_norm, mfu, passes, skipped_[bold]" in out, out
    assert "unknown to this version were ignored: of_tomorrow." in out and "7 rows up to step 7" in out
    assert main(["watch", str(run), "--html", str(run / "board.html"), "--once"]) == 0
    assert "5 lines are not rows" in (run / "board.html").read_text()


def test_wandb_offline_keeps_the_runs_id(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra megaponder[wandb] is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert main(["replay", str(run), "--wandb", "offline"]) == 0
    name = (run / "run_id").read_text().strip()
    [stored] = (run / "wandb").glob(f"offline-run-*-{name}")
    [log] = stored.glob(f"run-{name}.wandb")
    deadline = time.monotonic() + 120  # a process of wandb's own writes it
    while (data := log.read_bytes()).count(b"ponder/mean_depth") < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert data.count(b"ponder/mean_depth") >= 3 and b"train/step" in data


def test_a_start_is_counted_and_the_id_stays(run: Path) -> None:
    first = (run / "run_id").read_text().strip()
    assert identity.start(run) == identity.Identity(first, 1) and identity.start(run).restarts == 2


def test_a_place_that_cannot_be_written_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "tensorboard").write_text("a file, where a folder is to be")
    assert main(["replay", str(run), "--tensorboard"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and str(run / "tensorboard") in said and "Traceback" not in said
