"""One name for a metric in every place, and no metric that nothing sets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaponder.config.schema import RunConfig
from megaponder.engine import depth
from megaponder.monitor import registry
from megaponder.monitor.registry import METRICS
from megaponder.monitor.row import Row, from_flat

ROOT = Path(__file__).resolve().parents[2]
LABELS = {
    "pass": "2",
    "depth": "3",
    "bin": "7",
    "iteration": "1",
    "reason": "spike",
    "tensor": "grad",
    "set": "wiki",
    "task": "piqa_acc",
    "phase": "first_step",
}


@pytest.mark.parametrize("field", ["name", "tag", "prometheus"])
def test_a_name_is_used_once(field: str) -> None:
    names = [getattr(m, field) for m in METRICS if getattr(m, field)]
    assert len(names) == len(set(names))


def test_prometheus_names_keep_its_rules() -> None:
    for metric in METRICS:
        assert metric.help.endswith(".") and metric.kind and (metric.unit or metric.kind == "info")
        assert re.fullmatch(r"[a-z][a-z0-9_]*|", metric.prometheus), metric
        assert "step" not in metric.labels and not set(metric.labels) & set(registry.COMMON_LABELS)
        if metric.prometheus and metric.unit == "s":
            assert metric.prometheus.endswith("_seconds")
        if metric.prometheus and metric.unit == "bytes":
            assert metric.prometheus.endswith("_bytes")


@pytest.mark.parametrize("metric", [m for m in METRICS if m.name], ids=lambda m: m.name)
def test_a_row_finds_its_metric(metric: registry.Metric) -> None:
    name = metric.name.format(**LABELS)
    found = registry.find(name, metric.ponder)
    assert found is not None and found[0] is metric
    assert list(found[1]) == list(metric.labels) and all(LABELS[k] == v for k, v in found[1].items())
    assert registry.tag(name, metric.ponder) == metric.tag.format(**LABELS)


def test_rows_survive_the_file_and_the_trackers_get_grouped_names() -> None:
    row = Row(3, 12, 96, {"loss": 2.0, "total_steps": 9}, {"mean_depth": 1.5, "odd": 4.0})
    assert from_flat(row.flat()) == row
    assert row.tagged() == {"train/loss": 2.0, "train/tokens": 96, "ponder/mean_depth": 1.5, "ponder/odd": 4.0}


def test_statistics_of_halting_are_in_the_registry() -> None:
    means = dict.fromkeys(depth.names(3), 0.0) | {"depth": 2.0, "depth_sq": 4.5, "at1": 0.25, "at2": 0.5, "at3": 0.25}
    means |= {"nll1": 0.5, "nll2": 1.5, "nll3": 1.0}
    means |= {"gate0/0": 0.2, "gate0/5": 0.5, "gate0/9": 0.3, "jacobi_rmse0": 0.01, "expected_depth": 2.2}
    found = depth.metrics(means, 3.0)
    assert [found[f"loss_depth{k}"] for k in (1, 2, 3)] == pytest.approx([2.0, 3.0, 4.0])
    assert found["gate0_saturation"] == pytest.approx(0.5) and "gate1_saturation" not in found
    assert [n for n in found if registry.find(n, ponder=True) is None] == []
    stats = {m.name for m in METRICS if m.ponder and not m.name.startswith("valid_")}
    assert {registry.find(n, True)[0].name for n in found} == stats  # type: ignore[index]


def test_what_has_no_row_is_set_by_the_exporter() -> None:
    text = "".join((ROOT / "megaponder" / "monitor" / f"{n}.py").read_text() for n in ("exporter", "samples"))
    for metric in METRICS:
        if metric.prometheus and not metric.name and metric.kind in ("gauge", "counter", "summary"):
            assert f'"{metric.prometheus}"' in text, metric.prometheus


def test_the_documentation_lists_all() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    listed = set(re.findall(r"^\| `(megaponder_\w+)`", text, re.MULTILINE))
    suffix = {"counter": "_total", "info": "_info"}
    assert listed == {registry.PREFIX + m.prometheus + suffix.get(m.kind, "") for m in METRICS if m.prometheus}
    fields = RunConfig().logging
    assert fields.prometheus_port == 0 and fields.prometheus_host == "127.0.0.1", "off, and for this machine alone"
