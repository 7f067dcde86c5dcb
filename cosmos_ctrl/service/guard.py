"""What stands between the library and the RPCs: nothing unexpected reaches a client.

* A request that cannot be decoded is MALFORMED; the library's own answer would be UNKNOWN with a Python exception's text.
* A domain error becomes its status. Any other exception becomes INTERNAL with an incident number, and its trace goes to the log.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from cosmos_ctrl.core.errors import ControlError, InternalError, MalformedError
from cosmos_ctrl.service.status import to_status

_log = logging.getLogger(__name__)


class _Undecodable:
    """Stands for a request whose bytes are not its message."""


class Guard(grpc.aio.ServerInterceptor):
    """Wraps every handler of our service."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, guarded; other services' handlers as they are."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or not method.startswith(self._prefix):
            return handler
        deserialize = _safe(handler.request_deserializer)
        serialize = handler.response_serializer
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(_stream_stream(handler.stream_stream), deserialize, serialize)
        if handler.response_streaming:
            encode = _unless_encoded(serialize)
            return grpc.unary_stream_rpc_method_handler(_unary_stream(handler.unary_stream), deserialize, encode)
        return grpc.unary_unary_rpc_method_handler(_unary_unary(handler.unary_unary), deserialize, serialize)


def _safe(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:
            return _Undecodable()

    return decode


def _unless_encoded(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """A handler may yield its messages, or their bytes."""

    def encode(response: Any) -> bytes:
        return response if isinstance(response, bytes) else serialize(response)

    return encode


def _decoded(request: Any) -> Any:
    if isinstance(request, _Undecodable):
        raise MalformedError(what="the bytes are not the message of this RPC")
    return request


def _unary_unary(behaviour: Any) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await behaviour(_decoded(request), context)
        except Exception as error:
            await _abort(context, error)

    return guarded


def _unary_stream(behaviour: Any) -> Any:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(_decoded(request), context):
                yield response
        except Exception as error:
            await _abort(context, error)

    return guarded


class _Checked:
    """The context of a handler that reads and writes itself: what it reads is decoded."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.write = context.write

    async def read(self) -> Any:
        return _decoded(await self._context.read())


def _stream_stream(behaviour: Any) -> Any:
    async def guarded(requests: AsyncIterator[Any], context: Any) -> None:
        try:
            await behaviour(requests, _Checked(context))
        except Exception as error:
            await _abort(context, error)

    return guarded


async def _abort(context: Any, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        raise error
    if not isinstance(error, ControlError):
        incident = secrets.token_hex(4)
        _log.error("incident %s", incident, exc_info=error)
        error = InternalError(incident=incident)
    await context.abort_with_status(to_status(error))
    raise AssertionError("abort_with_status returns to nobody")
