"""The gRPC channel of a client, and who it says it is when it registers.

* Messages have limits, silence is pinged, and a peer that does not answer a ping is gone in seconds.
* Reconnecting is the client's own: the library neither replays calls nor backs off for long.
"""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import duration_pb2

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.settings import ClientConfig, Endpoint, WorkerPlace

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

_ROLES = {"trainer": pb.ROLE_TRAINER, "rollout": pb.ROLE_ROLLOUT}


def open_channel(endpoint: Endpoint, config: ClientConfig) -> grpc.aio.Channel:
    """A channel of its own, on the running loop; it connects when it is first used."""
    options = (
        ("grpc.keepalive_time_ms", int(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(config.ping_timeout_s * 1000)),
        ("grpc.http2.bdp_probe", 0),  # its pings cost small messages a sixth
        ("grpc.http2.ping_timeout_ms", int(config.ping_timeout_s * 1000)),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Two roles in one process do not share a connection, so neither waits behind the other's payloads.
        ("grpc.use_local_subchannel_pool", 1),
    )
    return grpc.aio.insecure_channel(endpoint.address, options=options)


def registration(place: WorkerPlace, execution_id: str, incarnation: str) -> pb.RegisterWorkerRequest:
    """The request that opens a session for this process."""
    return pb.RegisterWorkerRequest(
        execution_id=execution_id,
        role=_ROLES[place.role],
        group=place.group,
        replica=place.replica,
        rank=place.rank,
        world_size=place.world_size,
        dp_rank=place.dp_rank,
        dp_size=place.dp_size,
        incarnation=incarnation,
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def name_of(enum: _EnumTypeWrapper[Any], value: int) -> str:
    """The name of an enum's value without the enum's own; a value that only a newer controller knows is ``UNKNOWN_7``, say."""
    if value not in enum.values():
        return f"UNKNOWN_{value}"
    return enum.Name(value).removeprefix(enum.Name(0).removesuffix("UNSPECIFIED"))


def duration_of(seconds: float) -> duration_pb2.Duration:
    """Seconds as the wire has them."""
    duration = duration_pb2.Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration


def on_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The client loop's exception handler."""
    # grpc.aio wakes every loop of the process through one socket; a loop that finds it drained reports this.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


async def set_within(event: asyncio.Event, deadline_s: float) -> bool:
    """Wait for `event`; False: it was not set in time.

    Without `asyncio.wait_for`: before Python 3.12 that one loses a cancellation which comes when the wait is over, and the cancelled
    task goes on.
    """
    if event.is_set():
        return True
    waiter = asyncio.ensure_future(event.wait())
    try:
        done, _ = await asyncio.wait({waiter}, timeout=max(0.0, deadline_s))
        return bool(done)
    finally:
        waiter.cancel()
