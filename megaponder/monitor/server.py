"""The HTTP endpoint that Prometheus scrapes: /metrics, and /health for probes.  It lives in threads of its own."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from megaponder.monitor.samples import Samples

STALLED_SECONDS = 600.0
"""Age of the last step from which on a run counts as stalled, if ten mean steps are shorter."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True

    def server_bind(self) -> None:
        """Without the base class's look-up of the host's name, which may hang where no name server answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the console belongs to the run."""


class Endpoint:
    """Serves the samples until it is closed; OSError if the address cannot be had."""

    def __init__(self, samples: Samples, host: str, port: int):
        registry = CollectorRegistry(auto_describe=False)
        registry.register(samples)
        self._samples, self._metrics = samples, make_wsgi_app(registry)
        self._server = make_server(host, port, self._answer, _Server, _Quiet)
        self.port = int(self._server.server_port)
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

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
        self._server.shutdown()
        self._server.server_close()


def health(samples: Samples, now: float) -> tuple[str, dict[str, Any]]:
    """HTTP status and body: 200 while steps come, 503 when the last one is too long ago."""
    last = samples.get("last_step_timestamp_seconds") or samples.get("start_timestamp_seconds")
    age = now - last if last else 0.0
    ok = age <= max(STALLED_SECONDS, 10 * samples.mean_step())
    body = {"status": "ok" if ok else "stalled", "step": samples.get("step"), "last_step_age_seconds": round(age, 1)}
    return ("200 OK" if ok else "503 Service Unavailable"), body
