"""What the comments of the RPCs say of errors, and an ear for what a server answers with.

An RPC's comment has two paragraphs, "Retry:" and "Final:", each a list of reasons.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from google.rpc import error_details_pb2, status_pb2
from reference import Comments, descriptors

from cosmos_ctrl.service.status import DOMAIN

_SERVICE, _METHODS = (6, 0), 2
_LIST = re.compile(r"^(Retry|Final): ((?:[A-Z_]+, )*[A-Z_]+)\.$", re.MULTILINE)


@functools.cache
def comments_of_rpcs() -> dict[str, str]:
    """By the RPC's name."""
    (file,) = [file for file in descriptors().file if file.service and file.package == DOMAIN]
    comments = Comments(file)
    return {rpc.name: comments[(*_SERVICE, _METHODS, n)] for n, rpc in enumerate(file.service[0].method)}


@functools.cache
def documented() -> dict[str, dict[str, str]]:
    """Of each RPC the reasons it may answer with: "Retry" or "Final"."""
    return {
        rpc: {reason: kind for kind, reasons in _LIST.findall(text) for reason in reasons.split(", ")}
        for rpc, text in comments_of_rpcs().items()
    }


class Ear(grpc.aio.ServerInterceptor):
    """Stands outside of the guard and notes every refusal of a domain error, by RPC and reason."""

    def __init__(self) -> None:
        self.heard: set[tuple[str, str]] = set()

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        rpc = handler_call_details.method.rpartition("/")[2]
        for kind in ("unary_unary", "unary_stream", "stream_stream"):
            if handler is not None and (behaviour := getattr(handler, kind)):
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                heard = self._over_stream if kind == "unary_stream" else self._over
                return make(heard(rpc, behaviour), handler.request_deserializer, handler.response_serializer)
        return handler

    def _over(self, rpc: str, behaviour: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            return await behaviour(request, _Heard(self, rpc, context))

        return call

    def _over_stream(self, rpc: str, behaviour: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            async for response in behaviour(request, _Heard(self, rpc, context)):
                yield response

        return call


class _Heard:
    def __init__(self, ear: Ear, rpc: str, context: Any) -> None:
        self._ear, self._rpc, self._context = ear, rpc, context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def abort_with_status(self, status: Any) -> None:
        details = dict(status.trailing_metadata)["grpc-status-details-bin"]
        for packed in status_pb2.Status.FromString(details).details:
            info = error_details_pb2.ErrorInfo()
            if packed.Unpack(info):
                self._ear.heard.add((self._rpc, info.reason))
        await self._context.abort_with_status(status)
