"""A call whose stream is reset without a status got no answer, whatever the library makes of it: every client sends it again.

A server that goes down can leave its calls so. The libraries call that INTERNAL, like a status that a server sends, which is final.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from clients import BUILD_S, Client, chosen, command_of
from controller_process import DEADLINE_S

pytestmark = pytest.mark.timeout(BUILD_S + 60)

_PREFACE_BYTES, _HEADER_BYTES = 24, 9
_HEADERS, _RST_STREAM, _SETTINGS, _PING = 1, 3, 4, 6
_ACK = 1

#: Calls after which a client has shown that it sends again.
_CALLS = 3


class ResettingServer:
    """Speaks as much HTTP/2 as it takes to reset every stream with one error code."""

    def __init__(self, error_code: int) -> None:
        self._calls = threading.Semaphore(0)
        self._error_code = error_code
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def called_by(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for one more call; False: the process has ended, or none came in time."""
        end = time.monotonic() + DEADLINE_S
        while not self._calls.acquire(timeout=0.05):
            if process.poll() is not None or time.monotonic() > end:
                return False
        return True

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except OSError:  # closed
            pass

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as incoming:
                connection.sendall(_frame(_SETTINGS, 0, 0))
                incoming.read(_PREFACE_BYTES)
                while header := incoming.read(_HEADER_BYTES):
                    kind, flags, stream = header[3], header[4], int.from_bytes(header[5:], "big")
                    payload = incoming.read(int.from_bytes(header[:3], "big"))
                    if kind in (_SETTINGS, _PING) and not flags & _ACK:
                        connection.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
                    elif kind == _HEADERS:
                        self._calls.release()
                        connection.sendall(_frame(_RST_STREAM, 0, stream, struct.pack(">I", self._error_code)))
        except OSError:  # the client is gone
            pass


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


@contextmanager
def resetting(error_code: int) -> Iterator[ResettingServer]:
    server = ResettingServer(error_code)
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize("error_code", [0, 2], ids=["NO_ERROR", "INTERNAL_ERROR"])
@pytest.mark.parametrize("client", chosen(), ids=[client.language for client in chosen()])
def test_a_call_on_a_stream_that_is_reset_is_made_again(client: Client, error_code: int) -> None:
    command = command_of(client)
    with resetting(error_code) as server:
        environment = os.environ | {"COSMOS_CTRL_ADDRESS": server.address, "GRPC_VERBOSITY": "NONE"}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        try:
            calls = sum(server.called_by(process) for _ in range(_CALLS))
        finally:
            process.kill()
            said, _ = process.communicate()
        assert calls == _CALLS, said.decode()
