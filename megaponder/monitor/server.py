"""The HTTP endpoint that Prometheus scrapes: /metrics, and /health for probes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app

from megaponder.monitor.http_server import HttpServer
from megaponder.monitor.samples import Samples

STALLED_SECONDS = 600.0
"""Age of the last step above which a run counts as stalled, if ten mean steps are shorter."""


class Endpoint:
    """Serves the samples until it is closed; OSError or RuntimeError if the address or a thread is not available."""

    def __init__(self, samples: Samples, host: str, port: int):
        registry = CollectorRegistry(auto_describe=False)
        registry.register(samples)
        self._samples, self._metrics = samples, make_wsgi_app(registry)
        self._server = HttpServer(host, port, self._answer)
        self.port = self._server.port

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            return self._metrics(environ, start)
        if path == "/health":
            status, body = health(self._samples, time.time())
            start(status, [("Content-Type", "application/json")])
            return [json.dumps(body).encode() + b"\n"]
        start("404 Not Found", [("Content-Type", "text/plain")])
        return [b"there are /metrics and /health\n"]

    def close(self) -> None:
        """Stop and free the port."""
        self._server.close()


def health(samples: Samples, now: float) -> tuple[str, dict[str, Any]]:
    """HTTP status and body: 200 while steps are made, 503 if the last one is too long ago."""
    last = samples.get("last_step_timestamp_seconds") or samples.get("start_timestamp_seconds")
    age = now - last if last else 0.0
    ok = age <= max(STALLED_SECONDS, 10 * samples.mean_step())
    body = {"status": "ok" if ok else "stalled", "step": samples.get("step"), "last_step_age_seconds": round(age, 1)}
    return ("200 OK" if ok else "503 Service Unavailable"), body
