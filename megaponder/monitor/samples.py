"""The present values of all Prometheus metrics of a process, and how prometheus-client reads them.

The training thread only assigns to dictionary items; a scrape reads them in the server's thread.  Neither waits for the
other, so a scrape may see a step half told, never a step delayed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from megaponder.monitor import registry
from megaponder.monitor.row import Row

KNOWN = {m.prometheus: m for m in registry.METRICS if m.prometheus}
Labels = tuple[str, ...]


class Samples(Collector):
    """Values by metric and labels."""

    def __init__(self, common: Mapping[str, str], build: Mapping[str, str]):
        self._common = [common[name] for name in registry.COMMON_LABELS]
        self._build = dict(build)
        self._values: dict[tuple[str, Labels], float] = {}
        self._summaries: dict[tuple[str, Labels], tuple[float, int]] = {}
        self._histogram: tuple[tuple[int, ...], float] = ((0,) * (len(registry.BUCKETS) + 1), 0.0)

    def set(self, name: str, value: float, *labels: str) -> None:
        """The value of a gauge or counter, by its Prometheus name."""
        self._values[name, labels] = value

    def get(self, name: str, *labels: str) -> float | None:
        """The value that was set last."""
        return self._values.get((name, labels))

    def count(self, name: str, *labels: str) -> None:
        """One more."""
        self._values[name, labels] = self._values.get((name, labels), 0) + 1

    def observe(self, name: str, value: float, *labels: str) -> None:
        """One more observation of a summary."""
        total, count = self._summaries.get((name, labels), (0.0, 0))
        self._summaries[name, labels] = total + value, count + 1

    def observe_step(self, seconds: float) -> None:
        """One more step in the histogram of step durations."""
        counts, total = self._histogram
        at = bisect_left(registry.BUCKETS, seconds)
        self._histogram = tuple(c + (i == at) for i, c in enumerate(counts)), total + seconds

    def mean_step(self) -> float:
        """Mean seconds of the steps so far; 0 before the first."""
        counts, total = self._histogram
        return total / max(1, sum(counts))

    def take(self, row: Row) -> None:
        """All values of a row that Prometheus has a name for."""
        for values, ponder in ((row.values | row.position(), False), (row.stats, True)):
            for name, value in values.items():
                found = registry.find(name, ponder)
                if found is not None and found[0].prometheus:
                    self.set(found[0].prometheus, value, *found[1].values())

    def collect(self) -> Iterable[Metric]:
        """Called by a scrape."""
        values, summaries = dict(self._values), dict(self._summaries)
        for name, metric in KNOWN.items():
            family = self._family(metric)
            for (of, labels), value in values.items():
                if of == name:
                    family.add_metric([*self._common, *labels], value)
            for (of, labels), (total, count) in summaries.items():
                if of == name:
                    family.add_metric([*self._common, *labels], count, total)
            if metric.kind == "histogram":
                self._add_histogram(family)
            if metric.kind == "info":
                family.add_metric(self._common, self._build)
            if family.samples:
                yield family

    def _family(self, metric: registry.Metric) -> Any:
        families: dict[str, Any] = {
            "gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily,
            "summary": SummaryMetricFamily, "info": InfoMetricFamily,
        }  # fmt: skip
        names = list(registry.COMMON_LABELS) + ([] if metric.kind == "info" else list(metric.labels))
        return families[metric.kind](registry.PREFIX + metric.prometheus, metric.help, labels=names)

    def _add_histogram(self, family: Any) -> None:
        counts, total = self._histogram
        if not sum(counts):
            return
        below, buckets = 0, []
        for end, count in zip([*map(str, registry.BUCKETS), "+Inf"], counts, strict=True):
            below += count
            buckets.append((end, below))
        family.add_metric(self._common, buckets, total)
