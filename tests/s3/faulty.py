"""A small HTTP server in front of another that fails on demand: refuses, cuts, delays, lies, loses answers."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

from tests.s3.server import Server

Kind = Literal["refuse", "lose", "cut", "stall", "lie", "damage", "early", "replace", "hang"]


@dataclass
class Fault:
    """What happens to the next ``times`` requests that fit, after ``skip`` that fit and pass.

    ``refuse``: answered with ``status`` and ``code``, not passed on. ``lose``: passed on, then the connection
    is closed without an answer. ``early``: closed before it is passed on. ``cut``: the answer's body ends after
    ``at`` bytes. ``stall``: answered after ``seconds``. ``lie``: the answer says that it has only ``at`` bytes.
    ``damage``: a byte of the request's body is changed on its way. ``replace``: answered with ``status`` and
    ``body``, not passed on. ``hang``: neither passed on nor answered, for as long as the proxy is there.
    """

    kind: Kind
    method: str = ""
    path: str = ""
    times: int = 1
    skip: int = 0
    status: int = 503
    code: str = "SlowDown"
    at: int = 0
    seconds: float = 0.0
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def fits(self, method: str, path: str) -> bool:
        """Whether it is this one's turn; counts."""
        if self.times <= 0 or self.method not in ("", method) or self.path not in path:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class Faulty:
    """The proxy: arm faults, look at what was asked."""

    def __init__(self, behind: str) -> None:
        parts = urlsplit(behind)
        assert parts.hostname and parts.port
        self.behind = (parts.hostname, parts.port)
        self.asked: list[tuple[str, str]] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._meanwhile: Callable[[], None] | None = None
        self.hanging = threading.Event()
        self.over = threading.Event()

    def after_next_fault(self, call: Callable[[], None]) -> None:
        """Run it when the next fault has happened, before anything is answered."""
        self._meanwhile = call

    def happened(self) -> None:
        """A fault has happened."""
        call, self._meanwhile = self._meanwhile, None
        if call is not None:
            call()

    def arm(self, *faults: Fault) -> None:
        """Only these, from now on; what was asked is forgotten."""
        with self._lock:
            self._faults, self.asked = list(faults), []

    def take(self, method: str, path: str) -> Fault | None:
        """The fault of this request."""
        with self._lock:
            self.asked.append((method, path))
            return next((fault for fault in self._faults if fault.fits(method, path)), None)

    def count(self, method: str) -> int:
        """How many requests of that method were asked since the last ``arm``."""
        with self._lock:
            return sum(asked == method for asked, _ in self.asked)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away while it is answered is what some tests are for."""


@contextmanager
def faulty(server: Server) -> Iterator[tuple[Faulty, Server]]:
    """A proxy in front of ``server``, and the server as seen through it."""
    proxy = Faulty(server.endpoint)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            _pass_on(self, proxy)

        do_PUT = do_HEAD = do_POST = do_DELETE = do_GET

    listener = _Listener(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy, Server(f"http://127.0.0.1:{listener.server_port}", server.bucket, server.writers)
    finally:
        proxy.over.set()
        listener.shutdown()
        thread.join()
        listener.server_close()


def _pass_on(handler: BaseHTTPRequestHandler, proxy: Faulty) -> None:
    fault = proxy.take(handler.command, handler.path)
    kind = fault.kind if fault else None
    body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    if kind == "hang":
        proxy.hanging.set()
        proxy.over.wait()
        handler.close_connection = True
        return
    if kind == "early":
        proxy.happened()
        _close(handler)
        return
    if fault and kind == "refuse":
        _answer(handler, fault.status, fault.headers, _error(fault.code))
        return
    if fault and kind == "replace":
        _answer(handler, fault.status, fault.headers, fault.body)
        return
    if kind == "damage" and body:
        body = bytes([body[0] ^ 1]) + body[1:]
    status, headers, data = _ask(proxy.behind, handler, body)
    if kind == "lose":
        proxy.happened()
        _close(handler)
    elif fault and kind == "cut":
        _answer(handler, status, headers, data[: fault.at])
        _close(handler)
    elif fault and kind == "lie":
        _answer(handler, status, headers | {"Content-Length": str(fault.at)}, data[: fault.at])
    else:
        time.sleep(fault.seconds if fault else 0)
        _answer(handler, status, headers, data)


def _ask(
    behind: tuple[str, int], handler: BaseHTTPRequestHandler, body: bytes
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*behind, timeout=30)
    path, headers = handler.path, dict(handler.headers.items())
    if path.startswith("http://"):  # asked as a proxy, for BUCKET.HOST
        parts = urlsplit(path)
        del headers["Host"]
        path = f"/{parts.netloc.partition('.')[0]}{parts.path}" + (f"?{parts.query}" if parts.query else "")
    connection.request(handler.command, path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    dropped = ("connection", "transfer-encoding", "server", "date")
    told = {name: value for name, value in answer.getheaders() if name.lower() not in dropped}
    connection.close()
    return answer.status, told, data


def _answer(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    if not any(name.lower() == "content-length" for name in headers):
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def _close(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def _error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>armed</Message></Error>".encode()
