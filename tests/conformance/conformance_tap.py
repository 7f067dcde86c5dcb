"""Stands between the wire and the real servicer: every message of the client goes by here, and every answer to it.

It asks its `Script` what is to be done to a message, does it, and tells the observer what was said and what was delivered. A message
to which nothing is to be done, and every answer to it, passes through byte for byte.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from conformance_rules import Heard, Observer
from conformance_scenarios import Status, Step
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from cosmos_ctrl.service.status import DOMAIN
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2

#: The client's calls that are watched; the others are read-only, and pass by.
_REQUESTS: dict[str, Any] = {
    "RegisterWorker": pb.RegisterWorkerRequest,
    "LeasePrompts": pb.LeasePromptsRequest,
    "SubmitReports": pb.SubmitReportsRequest,
    "StreamReports": pb.StreamReportsRequest,
}

#: A field number, a reason of a refused row, and an execution that no controller knows.
_UNKNOWN_FIELD = 1999
_UNKNOWN_REASON: Any = 99
FOREIGN = "f" * 32

_CUT = "the connection is cut (by the conformance suite)"


class Script(Protocol):
    """What is done to the messages of one client."""

    observer: Observer

    async def plan(self, heard: Heard) -> list[Step]:
        """What is to be done to this message; what is done to the run has been done when it returns."""


@dataclass(slots=True)
class _Exchange:
    """One message on its way, and what is done to it."""

    heard: Heard
    steps: list[Step]

    def has(self, action: str) -> bool:
        return any(action in step.do for step in self.steps)

    @property
    def status(self) -> Status | None:
        return next((step.status for step in self.steps if step.status is not None), None)

    @property
    def delay_s(self) -> float:
        return sum(step.delay_s for step in self.steps)


class Tap(grpc.aio.ServerInterceptor):
    """See the module."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._calls = itertools.count(1)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, watched."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rsplit("/", 1)[-1]
        if handler is None or method not in _REQUESTS:
            return handler
        request = _REQUESTS[method]
        if handler.request_streaming:

            async def stream(requests: Any, context: Any) -> None:
                tapped = _Tapped(self._script, context, handler, request, next(self._calls))
                await handler.stream_stream(requests, tapped)

            return grpc.stream_stream_rpc_method_handler(stream)

        async def unary(raw: bytes, context: Any) -> bytes:
            tapped = _Tapped(self._script, context, handler, request, next(self._calls))
            message = await tapped.arrived(raw, has_deadline=context.time_remaining() is not None)
            response = await handler.unary_unary(message, tapped)
            return await tapped.outgoing(response)

        return grpc.unary_unary_rpc_method_handler(unary)


class _Tapped:
    """The context of one watched call."""

    def __init__(self, script: Script, context: Any, handler: Any, request: Any, call: int) -> None:
        self._script, self._context, self._handler, self._request, self._call = script, context, handler, request, call
        self._now: _Exchange

    async def arrived(self, raw: bytes, *, has_deadline: bool = True) -> Any:
        """Hands the message on to the servicer, unless something else is to be done to it."""
        heard = Heard(_kind(message := self._request.FromString(raw)), message, batch_of(raw), self._call)
        self._script.observer.heard(heard, has_deadline=has_deadline)
        now = self._now = _Exchange(heard, await self._script.plan(heard))
        if now.has("hang"):
            await asyncio.Event().wait()
        if now.has("lose_request"):
            await self._cut()
        if now.status is not None:
            await self.abort_with_status(to_status(now.status))
        return self._handler.request_deserializer(raw)

    async def outgoing(self, response: Any) -> bytes:
        """The answer as it is delivered, unless it is lost."""
        now = self._now
        if now.delay_s:
            await asyncio.sleep(now.delay_s)
        if now.has("lose_reply"):
            await self._cut()
        if now.has("foreign_header"):
            response.header.execution_id = FOREIGN
        if now.has("withhold_ack"):
            response.ack.applied = max(0, now.heard.message.batch.number - 1)
        if now.has("unknown_notice"):
            for notice in response.ack.notices:
                notice.CopyFrom(_unknown_kind(notice))
        if now.has("unknown_refusal"):
            for notice in response.ack.notices:
                if notice.HasField("refused"):
                    notice.refused.reason = _UNKNOWN_REASON
        self._script.observer.answered(now.heard, response, foreign=now.has("foreign_header"))
        raw: bytes = self._handler.response_serializer(response)
        return raw + _unknown_field() if now.has("unknown_fields") else raw

    async def abort_with_status(self, status: Any) -> None:
        """A refusal by the servicer, or by the script."""
        now = self._now
        if now.has("lose_reply"):
            await self._cut()
        info, retry_s = _told(status)
        self._script.observer.refused(now.heard, status.code.name, info, retry_s)
        await self._context.abort_with_status(status)

    async def read(self) -> Any:
        """As the library's."""
        raw = await self._context.read()
        return raw if raw is grpc.aio.EOF else await self.arrived(raw)

    async def write(self, response: Any) -> None:
        """As the library's."""
        await self._context.write(await self.outgoing(response))

    async def _cut(self) -> None:
        await self._context.abort(grpc.StatusCode.UNAVAILABLE, _CUT)


def _kind(message: Any) -> str:
    if isinstance(message, pb.RegisterWorkerRequest):
        return "register"
    if isinstance(message, pb.LeasePromptsRequest):
        return "lease"
    return "report" if message.HasField("batch") else "heartbeat"


def to_status(wanted: Status) -> grpc.Status:
    """The status that a scenario names."""
    details = []
    if wanted.reason:
        details.append(error_details_pb2.ErrorInfo(reason=wanted.reason, domain=DOMAIN, metadata=wanted.metadata))
    if wanted.retry_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(wanted.retry_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code = grpc.StatusCode[wanted.code]
    message = f"{wanted.reason or 'no reason'} (by the conformance suite)"
    packed = [any_pb2.Any() for _ in details]
    for one, detail in zip(packed, details, strict=True):
        one.Pack(detail)
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=packed))
    return status


def _told(status: grpc.Status) -> tuple[error_details_pb2.ErrorInfo, float | None]:
    told, retry_s = error_details_pb2.ErrorInfo(), None
    found = status_pb2.Status()
    for key, value in status.trailing_metadata or ():
        if key == "grpc-status-details-bin":
            found.ParseFromString(value)
    for packed in found.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if packed.Unpack(info) and info.domain == DOMAIN:
            told = info
        elif packed.Unpack(retry):
            retry_s = retry.retry_delay.ToNanoseconds() / 1e9
    return told, retry_s if told.reason else None


def batch_of(raw: bytes) -> bytes:
    """The encoded batch of an encoded report message; empty without one."""
    number = pb.StreamReportsRequest.DESCRIPTOR.fields_by_name["batch"].number
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        if key & 7 == 2:
            size, at = _varint(raw, at)
            if key >> 3 == number:
                return raw[at : at + size]
            at += size
        elif key & 7 == 0:
            _, at = _varint(raw, at)
        else:
            at += 8 if key & 7 == 1 else 4
    return b""


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _unknown_field() -> bytes:
    """An encoded field that no message of today has, as a newer controller may send it."""
    encoded = duration_pb2.Duration(seconds=7).SerializeToString()
    key = _UNKNOWN_FIELD << 3 | 2
    return bytes((key & 0x7F | 0x80, key >> 7 & 0x7F | 0x80, key >> 14)) + bytes((len(encoded),)) + encoded


def _unknown_kind(notice: reports_pb2.Notice) -> reports_pb2.Notice:
    """The notice with a kind that no client of today knows."""
    return reports_pb2.Notice.FromString(
        reports_pb2.Notice(number=notice.number).SerializeToString() + _unknown_field()
    )
