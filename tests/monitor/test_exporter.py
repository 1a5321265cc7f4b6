"""The endpoint over HTTP: names, labels, counters, health, and a port that is taken."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megaponder.config.schema import CheckpointConfig, LoggingConfig, RunConfig, TrainConfig
from megaponder.monitor import exporter, http_server, identity, registry
from megaponder.monitor.monitor import Monitor
from megaponder.monitor.phases import PhaseClock
from megaponder.monitor.row import Row
from megaponder.monitor.samples import Samples
from megaponder.monitor.server import health
from megaponder.monitor.throughput import Costs
from tests.distributed import free_port


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint waits for its client, this very process, even where that stands still."""
    monkeypatch.setattr(http_server, "SECONDS", 1000.0)


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


def samples(text: str) -> dict[str, dict[str, float]]:
    """Value by own labels (as text) by name."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            own = ",".join(f"{k}={v}" for k, v in s.labels.items() if k not in registry.COMMON_LABELS)
            found.setdefault(s.name, {})[own] = s.value
            assert set(registry.COMMON_LABELS) <= set(s.labels) and "step" not in s.labels
    return found


def config(tmp_path: Path, port: int) -> RunConfig:
    logging = LoggingConfig(tensorboard=False, prometheus_port=port)
    return RunConfig(str(tmp_path / "r"), train=TrainConfig(steps=10), checkpoint=CheckpointConfig(5), logging=logging)


def test_a_run_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    port = free_port()
    (tmp_path / "r").mkdir()
    identity.start(tmp_path / "r")
    now = [0.0]
    clock = PhaseClock(lambda: now[0])
    monitor = Monitor(config(tmp_path, port), 10, Costs(1.0, 1.0, 1, None), True, clock)
    monitor.start(0, 0, identity.start(tmp_path / "r"))
    before = samples(get(port, "/metrics"))
    assert before["megaponder_skipped_steps_total"] == {
        "reason=nonfinite": 0,
        "reason=spike": 0,
        "reason=no_targets": 0,
    }
    assert "megaponder_loss" not in before and "megaponder_step_duration_seconds_sum" not in before
    for step in (1, 2):
        for phase, seconds in (("data", 0.5), ("forward_backward", 0.25), ("optimizer", 0.125)):
            clock.enter(phase, step)
            now[0] += seconds
        clock.enter("report")
        monitor.stepped(step)
    monitor.skipped("spike")
    with clock.phase("evaluation"):
        now[0] += 8
    stats = {"mean_depth": 1.75, "active_pass0": 1.0, "active_pass1": 0.75, "gate0_bin3": 1.0, "not_listed": 1.0}
    monitor.write(Row(2, 8, 64, {"loss": 3.5, "step_seconds": 0.1, "tokens_per_second": 640.0}, stats))
    (tmp_path / "manifest.json").write_text(
        '{"files": {"a": {"bytes": 30, "crc32": 1}, "b": {"bytes": 12, "crc32": 2}}}'
    )
    monitor.saved(tmp_path, 1.5)
    told = samples(get(port, "/metrics"))
    expected = {
        "step": 2, "target_step": 10, "consumed_tokens_total": 64, "loss": 3.5, "restarts_total": 1,
        "ponder_passes_mean": 1.75, "checkpoint_bytes": 42, "checkpoint_duration_seconds": 1.5,
        "checkpoint_interval_steps": 5, "step_duration_seconds_count": 2, "tokens_per_second": 640,
    }  # fmt: skip
    assert {n: told[f"megaponder_{n}"][""] for n in expected} == expected
    assert told["megaponder_ponder_pass_tokens"] == {"pass=0": 1.0, "pass=1": 0.75}
    assert told["megaponder_skipped_steps_total"] == {"reason=nonfinite": 0, "reason=spike": 1, "reason=no_targets": 0}
    assert told["megaponder_phase_duration_seconds_count"] == {
        "phase=data": 2, "phase=optimizer": 2, "phase=forward_backward": 2, "phase=report": 2, "phase=evaluation": 1
    }  # fmt: skip
    assert told["megaponder_phase_duration_seconds_sum"]["phase=forward_backward"] == 0.5
    assert told["megaponder_step_duration_seconds_bucket"]["le=+Inf"] == 2
    assert set(told) - {n for m in registry.METRICS for n in m.exposed} == set()
    [build] = told["megaponder_build_info"]
    assert "run=r" in build and "version=0." in build and "config_hash=" in build
    text = get(port, "/metrics")
    assert 'job="77"' in text and 'node="node1"' in text
    body = json.loads(get(port, "/health"))
    assert body["status"] == "ok" and body["step"] == 2
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(port, "/")
    monitor.close()
    with pytest.raises(urllib.error.URLError):
        get(port, "/metrics")
    row = json.loads((tmp_path / "r" / "metrics.jsonl").read_text())
    assert row["skipped_spike"] == 1 and row["forward_backward_seconds"] == 0.25 and row["total_steps"] == 10


def test_a_taken_port_costs_the_metrics_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        (tmp_path / "r").mkdir()
        monitor = Monitor(config(tmp_path, port), 10, Costs(1.0, 1.0, 1, None), True, PhaseClock())
        monitor.start(0, 0)
        monitor.stepped(1)
        monitor.write(Row(1, 4, 32, {"loss": 1.0}))
        monitor.close()
    out = capsys.readouterr().out
    assert f"warning: logging.prometheus_port = {port}: 127.0.0.1:{port}" in out and "training continues" in out
    assert "loss 1.0000" in out


def test_one_process_of_a_node_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(tmp_path, 9500)
    for local, served in (("0", True), ("1", False)):
        for name, value in {"RANK": local, "WORLD_SIZE": "2", "LOCAL_RANK": local}.items():
            monkeypatch.setenv(name, value)
        assert exporter.wanted(cfg.logging) is served
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    assert exporter.wanted(cfg.logging) and not exporter.wanted(RunConfig().logging)


def test_health_fails_when_steps_cease(tmp_path: Path) -> None:
    made = exporter.start(config(tmp_path, free_port()), identity.Identity("x", 0), 7, 10)
    assert isinstance(made, exporter.Exporter)
    made.stepped(8, 100.0, {})
    last = made.samples.get("last_step_timestamp_seconds")
    assert last is not None
    assert health(made.samples, last + 900)[0] == "200 OK"  # within ten steps of 100 s
    status, body = health(made.samples, last + 1100)
    assert status.startswith("503") and body == {"status": "stalled", "step": 8, "last_step_age_seconds": 1100.0}
    made.close()


def test_a_counter_may_go_back() -> None:
    """Tokens do, with the run; Prometheus takes it for a restart."""
    s = Samples(dict.fromkeys(registry.COMMON_LABELS, "x"), {})
    assert s.get("consumed_tokens") is None
    for value in (64, 128, 96, 160):
        s.set("consumed_tokens", value)
        assert s.get("consumed_tokens") == value
    s.count("skipped_steps", "spike")
    s.count("skipped_steps", "spike")
    assert s.get("skipped_steps", "spike") == 2 and s.get("skipped_steps", "nonfinite") is None
