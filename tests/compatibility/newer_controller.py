"""A controller of the newer version: today's, behind a gRPC proxy that fills its answers with what only the newer version has.

It runs on a thread and loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from versions import PACKAGE, SERVICE, filled, newer

DEADLINE_S = 20.0
NEWER = newer()

#: Changes a message of the newer version, by the name of its RPC.
Change = Callable[[str, Any], None]


class Refused(Exception):
    """Raised by a `Change` of a request: the newer controller refuses it for a reason that only it knows."""

    def __init__(self, code: grpc.StatusCode, reason: str, *, later: bool) -> None:
        self.code = code
        info = error_details_pb2.ErrorInfo(reason=reason, domain=PACKAGE, metadata={"zone": "b"})
        details = [_packed(info)]
        if later:
            details.append(_packed(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=1000))))
        status = status_pb2.Status(code=code.value[0], message=reason, details=details)
        self.trailers = (("grpc-status-details-bin", status.SerializeToString()),)
        super().__init__(reason)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


class NewerController(grpc.GenericRpcHandler):
    """See the module."""

    def __init__(self, target: str, *, on_request: Change, on_response: Change) -> None:
        self._target, self._on_request, self._on_response = target, on_request, on_response
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.address = self._call(self._open())

    def close(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    async def _open(self) -> str:
        self._channel = grpc.aio.insecure_channel(self._target)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def _close(self) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        """The handler of a method of our service."""
        service, _, rpc = handler_call_details.method.lstrip("/").partition("/")
        if service != SERVICE:
            return None
        if rpc == "StreamReports":
            return grpc.stream_stream_rpc_method_handler(self._both(rpc))
        if rpc in ("FetchPayloads", "WatchRun"):
            return grpc.unary_stream_rpc_method_handler(self._down(rpc))
        return grpc.unary_unary_rpc_method_handler(self._unary(rpc))

    def _request(self, rpc: str, data: bytes) -> bytes:
        message = NEWER.request(rpc)
        message.MergeFromString(data)
        self._on_request(rpc, message)
        return bytes(message.SerializeToString())

    def _response(self, rpc: str, data: bytes) -> bytes:
        message = NEWER.response_type(rpc).FromString(data)
        self._on_response(rpc, message)
        return bytes(filled(message).SerializeToString())

    def _unary(self, rpc: str) -> Any:
        async def call(request: bytes, context: Any) -> bytes:
            async with _passing_on(context):
                answer = await self._channel.unary_unary(f"/{SERVICE}/{rpc}")(self._request(rpc, request))
                return self._response(rpc, answer)

        return call

    def _down(self, rpc: str) -> Any:
        async def call(request: bytes, context: Any) -> AsyncIterator[bytes]:
            async with _passing_on(context):
                async for answer in self._channel.unary_stream(f"/{SERVICE}/{rpc}")(self._request(rpc, request)):
                    yield self._response(rpc, answer)

        return call

    def _both(self, rpc: str) -> Any:
        async def call(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async def passed_on() -> AsyncIterator[bytes]:
                async for request in requests:
                    yield self._request(rpc, request)

            async with _passing_on(context):
                async for answer in self._channel.stream_stream(f"/{SERVICE}/{rpc}")(passed_on()):
                    yield self._response(rpc, answer)

        return call


@contextlib.asynccontextmanager
async def _passing_on(context: Any) -> AsyncIterator[None]:
    """What the call inside is refused with is what the caller is refused with."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata()))
    except Refused as error:
        await context.abort(error.code, str(error), error.trailers)
