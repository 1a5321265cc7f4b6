"""The endpoint's server beside clients that do what they should not: it answers who asks, and takes little."""

from __future__ import annotations

import gc
import json
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from megaponder.monitor import http_server
from megaponder.monitor.http_server import MOST, HttpServer
from tests.distributed import free_port

BIG = b"x" * 5_000_000


def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    if environ["PATH_INFO"] == "/broken":
        raise RuntimeError("a bug")
    start("200 OK", [("Content-Type", "text/plain")])
    said = {name: environ.get(name) for name in ("PATH_INFO", "QUERY_STRING", "HTTP_ACCEPT")}
    return [BIG if environ["PATH_INFO"] == "/big" else json.dumps(said).encode()]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    """One that drops nobody for being slow, as this process may be, too."""
    monkeypatch.setattr(http_server, "SECONDS", 1000.0)
    made = HttpServer("127.0.0.1", free_port(), application)
    yield made
    made.close()


def connect(server: HttpServer, request: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    made.sendall(request)
    return made


def ask(server: HttpServer, request: bytes) -> bytes:
    with connect(server, request) as client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_requests_are_answered(server: HttpServer) -> None:
    url = f"http://127.0.0.1:{server.port}/metrics?name=a"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": "text/x"}), timeout=60) as answer:
        assert json.load(answer) == {"PATH_INFO": "/metrics", "QUERY_STRING": "name=a", "HTTP_ACCEPT": "text/x"}
    head, _, body = ask(server, b"GET /big HTTP/1.0\n\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and body == BIG
    for request, status in (
        (b"HEAD / HTTP/1.1\r\n\r\n", b"200"), (b"POST / HTTP/1.1\r\n\r\n", b"405"), (b"rubbish\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 9_000 + b"\r\n\r\n", b"400"), (b"GET /broken HTTP/1.1\r\n\r\n", b"500"),
    ):  # fmt: skip
        head, _, body = ask(server, request).partition(b"\r\n\r\n")
        assert head.split()[1] == status and body == b""


def test_idle_slow_and_many_connections_are_shed(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(server, b"GET /met")) for _ in range(10 * MOST)]
        idle += [stack.enter_context(connect(server, b"GET /big HTTP/1.1\r\n\r\n")) for _ in range(3)]  # nobody reads
        deadline = time.monotonic() + 60
        while descriptors() - before - len(idle) > MOST and time.monotonic() < deadline:
            time.sleep(0.01)
        assert descriptors() - before - len(idle) <= MOST
        for _ in range(5):  # long before the others' time is over
            assert b"200 OK" in ask(server, b"GET /metrics HTTP/1.1\r\n\r\n")
    monkeypatch.setattr(http_server, "SECONDS", 0.2)
    with connect(server) as client:  # a byte now and then keeps nobody
        end = time.monotonic() + 60
        with pytest.raises(OSError):
            while time.monotonic() < end:
                client.sendall(b"G")
                time.sleep(0.05)


def test_its_end_frees_the_port() -> None:
    gc.collect()  # files that another test has left open
    before, port = descriptors(), free_port()
    for _ in range(2):
        made = HttpServer("127.0.0.1", port, application)
        with connect(made):
            made.close()
    assert descriptors() == before + 1  # the port's lock
