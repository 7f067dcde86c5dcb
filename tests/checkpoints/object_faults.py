"""An HTTP proxy in front of an object store that does what networks and servers do: loses replies and requests, refuses, ignores."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal[
    "lose the request",
    "lose the reply",
    "hang",
    "hide the condition",
    "cut the body",
    "meet",
    "answer",
    "answer after it",
]


@dataclass
class Rule:
    """What becomes of the next requests that match."""

    fault: Fault
    method: str = "PUT"
    path: str = ""
    """A regular expression; searched in path and query."""
    times: int = 1
    status: int = 500
    """Of "answer", which forwards nothing, and "answer after it", which forwards and hides what came of it."""
    body: bytes = b""


@dataclass
class Faults:
    """The proxy's address, its rules, and what was asked through it."""

    address: str
    rules: list[Rule] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    """Of "meet": two such requests are forwarded when both are there."""
    release: threading.Event = field(default_factory=threading.Event)
    """Ends every "hang"."""

    def add(self, fault: Fault, **named: Any) -> None:
        self.rules.append(Rule(fault, **named))

    def take(self, method: str, path: str) -> Rule | None:
        with self.lock:
            self.asked.append(f"{method} {path}")
            for rule in self.rules:
                if rule.times > 0 and rule.method == method and re.search(rule.path, path):
                    rule.times -= 1
                    return rule
        return None

    def count(self, method: str, path: str = "") -> int:
        """Requests so far."""
        with self.lock:
            asked = [one.partition(" ") for one in self.asked]
        return sum(verb == method and re.search(path, where) is not None for verb, _, where in asked)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Proxy

    def log_message(self, *_: Any) -> None:
        pass

    def handle_any(self) -> None:
        rule = self.server.faults.take(self.command, self.path)
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        fault = rule.fault if rule else ""
        if fault == "lose the request" or len(body) < length:  # the client gave up in the middle
            self.close_connection = True
            return
        if fault == "hang":
            self.server.faults.release.wait(20)
            self.close_connection = True
            return
        if fault == "meet":
            self.server.faults.meeting.wait(10)
        if rule and fault == "answer":
            self._answer(rule.status, rule.body, [("ETag", '"tag"')])
            return
        status, headers, answer = self._forward(body, conditional=fault != "hide the condition")
        if fault == "lose the reply":
            self.close_connection = True
        elif rule and fault == "answer after it":
            self._answer(rule.status, rule.body, [])
        elif fault == "cut the body":
            self._answer(status, answer, headers, keep=len(answer) // 2)
            self.close_connection = True
        else:
            self._answer(status, answer, headers)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any  # noqa: N815

    def _forward(self, body: bytes, *, conditional: bool) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.target, timeout=20)
        try:
            headers = {
                name: value for name, value in self.headers.items() if conditional or name.lower() != "if-none-match"
            }
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _answer(self, status: int, body: bytes, headers: list[tuple[str, str]], *, keep: int | None = None) -> None:
        self.send_response(status)
        sent = False
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "server", "date"):
                self.send_header(name, value)
                sent |= name.lower() == "content-length"
        if not sent:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:keep])


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    faults: Faults

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target

    def handle_error(self, *_: Any) -> None:
        """A client that gave up is what the test is about."""


@contextmanager
def faulty(target: str) -> Iterator[Faults]:
    """A proxy in front of `target`, without rules at first."""
    proxy = _Proxy(target)
    proxy.faults = Faults(f"127.0.0.1:{proxy.server_port}")
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield proxy.faults
    finally:
        proxy.faults.release.set()
        proxy.shutdown()
        thread.join(20)
        proxy.server_close()
