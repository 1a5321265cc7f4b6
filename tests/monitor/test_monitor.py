"""Rows, rates and series: arithmetic by hand, and what a resume does to each of them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading

import pytest

from megaponder.config.schema import LoggingConfig, RunConfig, TrainConfig
from megaponder.errors import ConfigError, UserError
from megaponder.monitor import console, jsonl
from megaponder.monitor.identity import run_id
from megaponder.monitor.monitor import Monitor
from megaponder.monitor.phases import PhaseClock
from megaponder.monitor.registry import amount
from megaponder.monitor.row import Row
from megaponder.monitor.throughput import Costs, Throughput
from megaponder.monitor.trackers import TensorBoard, WandB


def test_rates_by_hand():
    meter = Throughput(Costs(needed=3e9, executed=4e9, devices=4, peak_tflops=100.0))
    meter.restart(10, 1000)
    rates = meter.rates(20, 9000, seconds=2.0)  # 8000 tokens in 2 s on 4 devices
    assert rates["step_seconds"] == pytest.approx(0.2)
    assert rates["tokens_per_second"] == pytest.approx(4000)
    assert rates["tokens_per_second_per_device"] == pytest.approx(1000)
    assert rates["tflops_per_device"] == pytest.approx(3.0)
    assert rates["mfu"] == pytest.approx(0.03) and rates["hfu"] == pytest.approx(0.04)
    assert meter.rates(21, 9100, seconds=1.0)["tokens_per_second"] == pytest.approx(100)


def test_without_a_known_peak_no_utilisation_is_claimed():
    costs = Costs(1e9, 1e9, 1, None)
    rates = Throughput(costs).rates(1, 10, 1.0)
    assert "mfu" not in rates and "hfu" not in rates and "not shown" in costs.sentence()
    row = Row(1, 1, 10, {"loss": 1.0} | rates)
    assert "MFU" not in console.line(row, 10) and "tokens/s" in console.line(row, 10)


def test_the_line():
    values = {
        "loss": 3.25, "grad_norm": 0.5, "learning_rate": 3e-4, "step_seconds": 2.0, "tokens_per_second": 12345.0,
        "tokens_per_second_per_device": 12345.0, "tflops_per_device": 312.4, "mfu": 0.316, "hfu": 0.421,
    }  # fmt: skip
    assert console.line(Row(100, 800, 1_638_400, values), 2000) == (
        "step  100/2000 | tokens 1.64M | loss 3.2500 | grad norm 0.500 | lr 3.00e-04 | tokens/s 12.35k | "
        "TFLOP/s/device 312.4 | MFU 31.6 % | HFU 42.1 % | ETA 1h03m"
    )
    assert console.duration(90061) == "1d01h" and console.duration(59.6) == "1m00s" and amount(7) == "7"


def rows(steps) -> list[Row]:
    return [Row(s, 2 * s, 20 * s, {"loss": 1 / s}, {"depth": 1.5}) for s in steps]


def test_after_a_resume_the_series_is_one(tmp_path):
    lines = jsonl.JsonLines(tmp_path)
    for row in rows(range(1, 7)):
        lines.write(row)
    lines.close()
    with (tmp_path / jsonl.NAME).open("a") as file:
        file.write('{"step": 7, "lo')  # killed while writing
    assert jsonl.rewind(tmp_path, 4) == (2, 0)
    lines = jsonl.JsonLines(tmp_path)
    for row in rows(range(5, 9)):
        lines.write(row)
    lines.close()
    found = jsonl.read(tmp_path / jsonl.NAME)
    assert [r["step"] for r in found] == list(range(1, 9)) and found[2]["ponder_depth"] == 1.5
    assert [json.loads(t)["step"] for t in (tmp_path / jsonl.SUPERSEDED).read_text().splitlines()] == [5, 6]


@pytest.mark.parametrize("restarted", [False, True])
def test_what_comes_later_about_the_last_step_joins_its_row(tmp_path, restarted: bool):
    lines = jsonl.JsonLines(tmp_path)
    for row in rows([1, 2]):
        lines.write(row)
    if restarted:
        lines.close()
        jsonl.rewind(tmp_path, 2)
        lines = jsonl.JsonLines(tmp_path)
    lines.write(Row(2, 4, 40, {"validation_loss": 0.75}))
    lines.write(rows([3])[0])
    found = jsonl.read(tmp_path / jsonl.NAME)
    assert found == [rows([1])[0].flat(), rows([2])[0].flat() | {"validation_loss": 0.75}, rows([3])[0].flat()]


def test_a_lone_broken_line_does_not_spoil_the_first_row(tmp_path):
    (tmp_path / jsonl.NAME).write_text('{"st')
    assert jsonl.rewind(tmp_path, 0) == (0, 0)
    jsonl.JsonLines(tmp_path).write(rows([1])[0])
    assert [r["step"] for r in jsonl.read(tmp_path / jsonl.NAME)] == [1]


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    whole = json.dumps(rows([1])[0].flat())
    (tmp_path / jsonl.NAME).write_text(f'[1]\n"text"\n{{"loss": 2.0}}\n{{"step": "1"}}\n{whole}\n')
    assert [r["step"] for r in jsonl.of_run(tmp_path).rows] == [1]
    assert jsonl.rewind(tmp_path, 1) == (0, 4) and (tmp_path / jsonl.NAME).read_text() == f"{whole}\n"


def test_bytes_that_are_no_text_are_left_out(tmp_path):
    whole = json.dumps(rows([1])[0].flat())
    (tmp_path / jsonl.NAME).write_bytes(b"\xff\xfe\x00\x81\n" + whole.encode() + b"\n" + b"[" * 100_000 + b"\n\xc3")
    assert [r["step"] for r in jsonl.of_run(tmp_path).rows] == [1]
    assert jsonl.rewind(tmp_path, 1) == (0, 2) and (tmp_path / jsonl.NAME).read_text() == f"{whole}\n"


def monitor(tmp_path, logs: bool = True, **logging) -> Monitor:
    cfg = RunConfig(run=str(tmp_path), train=TrainConfig(steps=10), logging=LoggingConfig(**logging))
    return Monitor(cfg, 10, Costs(1.0, 1.0, 1, None), logs, PhaseClock())


def test_tensorboard_has_the_names_and_hides_what_a_resume_repeats(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for begin, steps in ((0, range(1, 7)), (3, range(4, 9))):
        m = monitor(tmp_path)
        m.start(begin, 20 * begin)
        for row in rows(steps):
            m.write(row)
        m.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "ponder/depth", "train/tokens"}
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 9))


def test_lost_rows_are_told(tmp_path, capsys):
    for number, (begin, text, told) in enumerate(((0, "", 0), (3, "", 1), (3, "rubbish\n", 1), (1, "", 0))):
        run = tmp_path / str(number)
        run.mkdir()
        (run / "metrics.jsonl").write_text(text)
        m = monitor(run, every=2, tensorboard=False)
        m.start(begin, 20 * begin)
        m.close()
        assert capsys.readouterr().out.count("has no rows for the first 3 steps") == told


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_has_no_rows(tmp_path, make):
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="is not a file, so no run can have written metrics into it; move it away"):
        jsonl.of_run(tmp_path)


def test_a_metrics_file_that_was_taken_away_is_told(tmp_path):
    """Its rows would go to a file that nobody can open any more."""
    for name, take_away in (
        ("removed", lambda run: shutil.rmtree(run)),
        ("moved", lambda run: run.rename(tmp_path / "elsewhere")),
        ("replaced", lambda run: (run / "metrics.jsonl").rename(run / "old") and (run / "metrics.jsonl").touch()),
    ):
        run = tmp_path / name
        run.mkdir()
        lines = jsonl.JsonLines(run)
        lines.write(rows([1])[0])
        take_away(run)
        with pytest.raises(UserError, match="was removed, moved or replaced during the run"):
            lines.write(rows([2])[0])


def test_tensorboards_thread_prints_no_traceback(tmp_path, capfd):
    tracker = TensorBoard(tmp_path, 0)
    shutil.rmtree(tmp_path / "tensorboard")
    with pytest.raises(FileNotFoundError):
        for row in rows(range(1, 50)):
            tracker.write(row)
    assert "Traceback" not in capfd.readouterr().err
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert "ZeroDivisionError" in capfd.readouterr().err, "errors of other threads are still shown"


def test_ranks_that_do_not_log_write_nothing(tmp_path, capsys):
    m = monitor(tmp_path, logs=False)
    m.start(0, 0)
    m.write(rows([1])[0])
    m.close()
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_rows_are_due_at_the_interval_and_at_the_end(tmp_path):
    m = monitor(tmp_path, every=4)
    assert [s for s in range(1, 11) if m.due(s)] == [4, 8, 10]


def test_a_value_without_a_name_is_a_bug():
    with pytest.raises(KeyError):
        Row(1, 1, 1, {"no such value": 1.0}).tagged()


def test_the_run_id_is_made_once(tmp_path):
    assert run_id(tmp_path) == run_id(tmp_path) != ""


def test_wandb_is_named_when_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"logging\.wandb"):
        WandB(tmp_path, RunConfig(logging=LoggingConfig(wandb="offline")))
