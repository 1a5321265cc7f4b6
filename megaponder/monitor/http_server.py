"""An HTTP server that cannot harm its process: one thread, a fixed number of descriptors, a deadline per client.

It answers GET and HEAD through a WSGI application and closes each connection after one answer.  A client that is
silent, or sends or reads slowly, has `SECONDS`.  If `MOST` connections are open, the oldest is closed for a new one: a
scraper sends its request at once and is served, however many others only hold connections open.
"""

from __future__ import annotations

import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.util import setup_testing_defaults

MOST = 16
"""Maximum open connections; with the listening socket, all descriptors that the server uses."""
SECONDS = 5.0
"""From accepting a connection to the last byte of its answer."""
REQUEST_BYTES = 8192
"""Largest request: a line and headers."""
_END = re.compile(rb"\r?\n\r?\n")

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Connection:
    def __init__(self, taken: socket.socket):
        self.socket, self.until = taken, time.monotonic() + SECONDS
        self.request, self.answer = b"", b""


class HttpServer:
    """Serves until it is closed; OSError or RuntimeError if the address or a thread is not available."""

    def __init__(self, host: str, port: int, application: Application):
        self._application = application
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.setblocking(False)
        self.host, self.port = self._listener.getsockname()[:2]
        self._selector = selectors.PollSelector()  # uses no descriptor of its own
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._open: dict[socket.socket, _Connection] = {}  # oldest first
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._listener.close()
            raise

    def close(self) -> None:
        """Stop and free the port."""
        self._end.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._end.is_set():
            ready = {key.fd for key, _ in self._selector.select(timeout=0.25)}
            for connection in [c for s, c in self._open.items() if s.fileno() in ready]:
                self._go_on(connection)
            if self._listener.fileno() in ready:
                self._accept()
            for connection in [c for c in self._open.values() if c.until < time.monotonic()]:
                self._drop(connection)
        for connection in list(self._open.values()):
            self._drop(connection)
        self._listener.close()

    def _accept(self) -> None:
        if len(self._open) >= MOST:
            self._drop(next(iter(self._open.values())))
            time.sleep(0.001)  # a flood uses this thread's time, not the process's
        try:
            taken, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # the process has no descriptor left: close our own connections
            if self._open:
                self._drop(next(iter(self._open.values())))
            time.sleep(0.1)
            return
        taken.setblocking(False)
        connection = self._open[taken] = _Connection(taken)
        self._selector.register(taken, selectors.EVENT_READ)
        self._go_on(connection)

    def _drop(self, connection: _Connection) -> None:
        del self._open[connection.socket]
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _go_on(self, connection: _Connection) -> None:
        """Read or write as much as possible; a connection that is done or fails is dropped."""
        try:
            if not connection.answer:
                received = connection.socket.recv(REQUEST_BYTES)
                connection.request += received
                whole = _END.search(connection.request) or len(connection.request) > REQUEST_BYTES
                if received and not whole:
                    return
                if not received:
                    self._drop(connection)
                    return
                connection.answer = self._respond(connection.request)
                self._selector.modify(connection.socket, selectors.EVENT_WRITE)
            connection.answer = connection.answer[connection.socket.send(connection.answer) :]
            if not connection.answer:
                self._drop(connection)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)

    def _respond(self, request: bytes) -> bytes:
        """The whole answer to a request."""
        environ = _environ(request)
        if environ is None:
            return _message("400 Bad Request", [], b"")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _message("405 Method Not Allowed", [("Allow", "GET, HEAD")], b"")
        said: list[Any] = []
        try:
            body = b"".join(self._application(environ, lambda status, headers, *_: said.extend((status, headers))))
            status, headers = said
        except Exception:  # whatever goes wrong here, the server keeps running
            return _message("500 Internal Server Error", [], b"")
        return _message(status, headers, body, environ["REQUEST_METHOD"] == "GET")


def _environ(request: bytes) -> dict[str, Any] | None:
    """The WSGI environment of a request; None if it is malformed or too long."""
    head = _END.split(request, maxsplit=1)[0].decode("latin-1")
    line, *fields = head.splitlines()
    words = line.split(" ")
    if len(request) > REQUEST_BYTES or len(words) != 3 or not words[2].startswith("HTTP/"):
        return None
    path, _, query = words[1].partition("?")
    environ: dict[str, Any] = {"REQUEST_METHOD": words[0], "PATH_INFO": path, "QUERY_STRING": query}
    for field in fields:
        name, _, value = field.partition(":")
        environ["HTTP_" + name.strip().upper().replace("-", "_")] = value.strip()
    setup_testing_defaults(environ)
    return environ


def _message(status: str, headers: list[tuple[str, str]], body: bytes, with_body: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + (body if with_body else b"")
