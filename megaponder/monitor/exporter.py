"""A node's Prometheus endpoint: what a run reports to it, and what happens if its port is taken."""

from __future__ import annotations

import time
from collections.abc import Mapping

from megaponder.config import launcher
from megaponder.config.schema import LoggingConfig, RunConfig
from megaponder.monitor import registry
from megaponder.monitor.identity import Identity, build_info, labels
from megaponder.monitor.row import Row
from megaponder.monitor.samples import Samples
from megaponder.monitor.server import Endpoint


def wanted(logging: LoggingConfig) -> bool:
    """Whether this process serves: the first of its node, if a port is configured."""
    return logging.prometheus_port > 0 and launcher.place().local_rank == 0


class Exporter:
    """Samples and the endpoint that serves them."""

    def __init__(self, cfg: RunConfig, identity: Identity, step: int, total_steps: int):
        self.samples = Samples(labels(identity), build_info(cfg))
        s = self.samples
        for reason in registry.SKIP_REASONS:  # a rate needs a counter that already existed
            s.set("skipped_steps", 0, reason)
        s.set("restarts", identity.restarts)
        s.set("step", step)
        s.set("target_step", total_steps)
        s.set("start_timestamp_seconds", time.time())
        if cfg.checkpoint.every:
            s.set("checkpoint_interval_steps", cfg.checkpoint.every)
        self._endpoint = Endpoint(s, cfg.logging.prometheus_host, cfg.logging.prometheus_port)

    def stepped(self, step: int, seconds: float, phases: Mapping[str, float]) -> None:
        """A step has ended."""
        s = self.samples
        s.set("step", step)
        s.set("last_step_timestamp_seconds", time.time())
        s.observe("step_duration_seconds", seconds)
        for name, value in phases.items():
            s.observe("phase_duration_seconds", value, name)

    def outside(self, phase: str, seconds: float) -> None:
        """An evaluation or a checkpoint has ended."""
        self.samples.observe("phase_duration_seconds", seconds, phase)

    def skipped(self, reason: str) -> None:
        """A step's update was skipped."""
        self.samples.count("skipped_steps", reason)

    def saved(self, size: int, seconds: float) -> None:
        """A checkpoint is complete."""
        s = self.samples
        s.set("checkpoint_bytes", size)
        s.set("checkpoint_duration_seconds", seconds)
        s.set("checkpoint_last_success_timestamp_seconds", time.time())

    def take(self, row: Row) -> None:
        """The values of a row."""
        self.samples.take(row)

    def close(self) -> None:
        """Free the port."""
        self._endpoint.close()


def start(cfg: RunConfig, identity: Identity, step: int, total_steps: int) -> Exporter | str:
    """An exporter, or the warning to print: a taken port loses the metrics, not the run."""
    try:
        return Exporter(cfg, identity, step, total_steps)
    except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
        host, port = cfg.logging.prometheus_host, cfg.logging.prometheus_port
        return (
            f"logging.prometheus_port = {port}: {host}:{port} on {labels(identity)['node']} cannot be used "
            f"({getattr(error, 'strerror', None) or error}), so this node has no /metrics; training continues."
        )
