"""The Prometheus metrics of a process: prometheus-client's own types, made from the table of `registry`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Metric,
    Summary,
    disable_created_metrics,
)
from prometheus_client.registry import Collector

from megaponder.monitor import registry
from megaponder.monitor.row import Row

disable_created_metrics()  # an extra series for each counter, which no board or alert reads
TYPES: dict[registry.Kind, Any] = {
    "gauge": Gauge, "counter": Counter, "histogram": Histogram, "summary": Summary, "info": Info,
}  # fmt: skip


class Samples(Collector):
    """Values by metric and labels.  A metric has no sample before its first value."""

    def __init__(self, common: Mapping[str, str], build: Mapping[str, str]):
        self._common = {name: common[name] for name in registry.COMMON_LABELS}
        self._registry = CollectorRegistry()
        self._known = {m.prometheus: m for m in registry.METRICS if m.prometheus}
        self._metrics = {name: self._made(metric) for name, metric in self._known.items()}
        self._of("build").info(dict(build))

    def _made(self, metric: registry.Metric) -> Any:
        labels = list(registry.COMMON_LABELS) + ([] if metric.kind == "info" else list(metric.labels))
        more = {"buckets": registry.BUCKETS} if metric.kind == "histogram" else {}
        name = registry.PREFIX + metric.prometheus
        return TYPES[metric.kind](name, metric.help, labels, registry=self._registry, **more)

    def _of(self, name: str, *labels: str) -> Any:
        return self._metrics[name].labels(*self._common.values(), *labels)

    def set(self, name: str, value: float, *labels: str) -> None:
        """The value of a gauge or counter, by its Prometheus name."""
        metric = self._of(name, *labels)
        if self._known[name].kind == "gauge":
            metric.set(value)
            return
        before = self.get(name, *labels) or 0.0
        if value < before:  # for example tokens, after a rollback
            metric.reset()
            before = 0.0
        metric.inc(value - before)

    def get(self, name: str, *labels: str) -> float | None:
        """The current value of a gauge or counter; None before its first."""
        return self._sample(self._known[name], self._known[name].exposed[0], labels)

    def _sample(self, metric: registry.Metric, exposed: str, labels: Iterable[str] = ()) -> float | None:
        own = dict(zip(metric.labels, labels, strict=True))
        return self._registry.get_sample_value(exposed, self._common | own)

    def count(self, name: str, *labels: str) -> None:
        """One more."""
        self._of(name, *labels).inc()

    def observe(self, name: str, value: float, *labels: str) -> None:
        """One more observation of a summary or histogram."""
        self._of(name, *labels).observe(value)

    def mean_step(self) -> float:
        """Mean seconds of the steps so far; 0 before the first."""
        steps = self._known["step_duration_seconds"]
        _, total, count = (self._sample(steps, exposed) or 0.0 for exposed in steps.exposed)
        return total / max(1.0, count)

    def take(self, row: Row) -> None:
        """All values of a row that Prometheus has a name for."""
        for values, ponder in ((row.values | row.position(), False), (row.stats, True)):
            for name, value in values.items():
                found = registry.find(name, ponder)
                if found is not None and found[0].prometheus:
                    self.set(found[0].prometheus, value, *found[1].values())

    def collect(self) -> Iterable[Metric]:
        """Called by a scrape."""
        return (family for family in self._registry.collect() if family.samples)
