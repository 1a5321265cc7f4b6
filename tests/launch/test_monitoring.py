"""Boards and alerts: they name what the code sets, and a real Prometheus answers their queries about a run."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from megaponder.cli.main import main
from megaponder.monitor import registry
from megaponder.monitor.jsonl import read
from megaponder.monitor.row import from_flat
from tests.distributed import Workers, free_port
from tests.external import EXTERNAL
from tests.training import datasets

FOLDER = Path(__file__).resolve().parents[2] / "launch" / "monitoring"
BOARD = FOLDER / "grafana" / "megaponder.json"
EMPTY = re.compile(r"DCGM_|cuda_|jacobi|expected_passes|auxiliary_loss|z_loss|straggler|fp8|validation_pass")
"""What a CPU run of one rank and this method has no values for."""
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="prometheus and promtool are not installed"
)


def yaml(name: str) -> Any:
    return YAML(typ="safe").load(FOLDER / name)


def panels() -> list[tuple[str, str]]:
    """(title, PromQL) of every query of the dashboard."""
    board = json.loads(BOARD.read_text())
    return [(p["title"], t["expr"]) for p in board["panels"] for t in p.get("targets", [])]


def rules() -> dict[str, dict[str, Any]]:
    return {r["alert"]: r for group in yaml("alerts.yml")["groups"] for r in group["rules"]}


def test_boards_and_alerts_name_what_the_registry_has_and_all_of_it() -> None:
    text = " ".join([e for _, e in panels()] + [r["expr"] for r in rules().values()])
    used = set(re.findall(r"\bmegaponder_\w+", text))
    exposed = {name for m in registry.METRICS for name in m.exposed}
    assert used - exposed == set(), "on a board, but nothing sets it"
    families = {m.prometheus: set(m.exposed) for m in registry.METRICS if m.exposed}
    assert [name for name, names in families.items() if not names & used] == [], "set, but on no board"


def test_the_rows_answer_the_questions() -> None:
    board = json.loads(BOARD.read_text())
    rows = [p["title"] for p in board["panels"] if p["type"] == "row"]
    assert rows == [
        "Is it alive?", "Is it learning?", "Is it pondering?", "Is it fast?", "Is the machine well?",
        "Are checkpoints written?",
    ]  # fmt: skip
    places = [p["gridPos"] for p in board["panels"]]
    assert all(a["x"] + a["w"] <= 24 for a in places)
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells)), "panels overlap"


def test_the_dashboard_is_what_its_generator_writes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    spec = importlib.util.spec_from_file_location("board", FOLDER / "board.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["board"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    assert module.text() == BOARD.read_text(), "run python launch/monitoring/board.py"


def test_every_alert_has_a_case_where_it_fires_and_one_where_it_is_silent() -> None:
    fires, silent = set(), set()
    for group in yaml("alerts.test.yml")["tests"]:
        for case in group["alert_rule_test"]:
            (fires if case.get("exp_alerts") else silent).add(case["alertname"])
    assert fires == set(rules()) and silent >= set(rules()) - {"StepsSkipped"}  # there beside runs that are fine


def test_compose_mounts_files_that_are_there() -> None:
    for service in yaml("compose.yml")["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("./") or (FOLDER / source).is_file(), source


@needs_prometheus
def test_promtool_accepts_all_and_every_alert_does_what_its_cases_say() -> None:
    for words in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts.test.yml"]):
        done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    if shutil.which("amtool"):
        assert subprocess.run(["amtool", "check-config", "alertmanager.yml"], cwd=FOLDER).returncode == 0


class Prometheus:
    """A server with the project's configuration, which scrapes one port every second."""

    def __init__(self, folder: Path, port: int):
        config = yaml("prometheus.yml")
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / "alerts.yml")]
        del config["alerting"]
        config["scrape_configs"] = [c for c in config["scrape_configs"] if c["job_name"] == "megaponder"]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        with (folder / "prometheus.yml").open("w") as file:
            YAML(typ="safe").dump(config, file)
        self.port = free_port()
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        command += [f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=error"]
        self.process = subprocess.Popen(command)

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str) -> list[Any]:
        plain = expression.replace("$run_id", ".*").replace("$__rate_interval", "5m")
        return self.ask("query", query=plain)["result"]

    def until(self, expression: str, seconds: float, workers: Workers) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                if self.query(expression):
                    return
            except OSError:
                pass  # it has not started to answer
            assert time.monotonic() < end and workers.poll() == [None], f"{expression}\n{workers.output()}"
            time.sleep(1)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Path, Workers]]:
    """A Prometheus that has scraped a run for some seconds, the run's folder and its process, still at work."""
    root, port = tmp_path_factory.mktemp("scraped"), free_port()
    datasets.write(root / "train", tokens=12 * 16 + 1, seed=1)
    datasets.write(root / "valid", tokens=200, seed=2)
    job = {
        "run": str(root / "run"), "data": str(root), "train__steps": 20000, "train__eval_every": 10,
        "train__micro_batch": 4, "train__eval_batches": 1, "checkpoint__every": 10, "checkpoint__keep_last": 1,
        "logging__every": 1, "logging__peak_tflops": 1.0, "logging__prometheus_port": port,
        "ponder__method": "adaponderlm", "ponder__options": {"target": 0.0},
    }  # fmt: skip
    server = Prometheus(root, port)
    workers = Workers("tests.training.workers:run_train", 1, job)
    try:
        for name in ("checkpoint_bytes", "validation_loss"):
            server.until(f"count_over_time(megaponder_{name}[5m]) >= 3", 300, workers)
        yield server, root / "run", workers
    finally:
        server.process.terminate()
        server.process.wait(60)
        workers.kill()


@EXTERNAL
@needs_prometheus
def test_a_real_prometheus_answers_every_panel_and_rule(scraped: tuple[Prometheus, Path, Workers]) -> None:
    server, run, workers = scraped
    empty = {title for title, expression in panels() if not server.query(expression) and not EMPTY.search(expression)}
    assert empty == set()
    server.until("count_over_time(megaponder_step[5m]) >= 5", 60, workers)
    found = {r["name"]: r for group in server.ask("rules")["groups"] for r in group["rules"]}
    assert set(found) == set(rules())
    assert {n: r.get("lastError") for n, r in found.items() if r["health"] != "ok"} == {}
    assert {n for n, r in found.items() if r["state"] == "firing"} - {"LossSpike"} == set()  # so short a run may jump
    [up] = server.query('up{job="megaponder"}')
    assert up["value"][1] == "1"
    [step] = server.query("megaponder_step")
    assert set(step["metric"]) == {"__name__", "instance", "run_id", "job", "node"}
    assert step["metric"]["run_id"] == (run / "run_id").read_text().strip() and step["metric"]["job"] == "local"

    assert main(["watch", str(run), "--once"]) == 0  # while the run writes

    workers.signal(signal.SIGTERM)
    assert workers.join(600) == [0] and "Stopped by SIGTERM" in workers.output()
    rows = [from_flat(r) for r in read(run / "metrics.jsonl")]
    assert {n for r in rows for n in r.values if registry.find(n) is None} == set()
    stats = {n.removeprefix("valid_") for r in rows for n in r.stats}
    assert {n for n in stats if registry.find(n, ponder=True) is None} == set()
    assert rows[-1].values.keys() >= {"data_seconds", "forward_backward_seconds", "optimizer_seconds", "passes"}
