"""Payloads of a benchmark: worker → controller → trainer, and the same bytes through a bare relay.

* The worker is the product's client and leases as it goes, so the controller's back-pressure is part of it; the trainer parses what
  it fetches.
* The relay is a `grpc.aio` server that knows no messages: bytes in, a bounded queue, bytes out.
* A message carries about 4 MiB on either way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from reports_clients import CALL_S, OPTIONS, Session
from reports_processes import obey, run_child

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.rollout import Rollout
from cosmos_worker.settings import Endpoint, WorkerPlace

WINDOW = 8
"""Messages of a worker that are unacknowledged."""


async def relay(queue: int) -> None:
    """The bare way: one hop to it, one from it."""
    held: asyncio.Queue[bytes] = asyncio.Queue(queue)

    async def push(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            await held.put(request)
            yield b"ack"

    async def pull(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(int(request)):
            yield await held.get()

    server = grpc.aio.server(options=[*OPTIONS, ("grpc.so_reuseport", 0)])
    handlers = {
        "Push": grpc.stream_stream_rpc_method_handler(push),
        "Pull": grpc.unary_stream_rpc_method_handler(pull),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Relay", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await obey({"address": f"127.0.0.1:{port}"})


async def bare_worker(address: str) -> None:
    """Pushes bytes."""
    call = grpc.aio.insecure_channel(address, options=OPTIONS).stream_stream("/Relay/Push")()

    async def push(messages: int, size: int) -> Any:
        room, message, began = asyncio.Semaphore(WINDOW), bytes(size), time.monotonic()

        async def write() -> None:
            for _ in range(messages):
                await room.acquire()
                await call.write(message)

        writing = asyncio.ensure_future(write())
        for _ in range(messages):
            await call.read()
            room.release()
        await writing
        return {"began": began}

    await obey(1, push=push)


async def bare_trainer(address: str) -> None:
    """Pulls them."""
    pull_bytes = grpc.aio.insecure_channel(address, options=OPTIONS).unary_stream("/Relay/Pull")

    async def pull(messages: int, size: int) -> Any:
        async for message in pull_bytes(b"%d" % messages):
            assert len(message) == size
        return {"ended": time.monotonic()}

    await obey(1, pull=pull)


async def worker(address: str, size: int, leased: int) -> None:
    """Reports completions of `size` bytes by the product's client, with at most `leased` groups in hand."""
    payload, place = bytes(size), WorkerPlace(role="rollout", group="product")
    async with Rollout(Endpoint(address=address), place) as rollout:

        async def push(completions: int, wait_s: float | None = None) -> Any:
            """So many, or until no group comes for so long."""
            began, left = time.monotonic(), completions
            async for group in rollout.groups(in_flight=leased, wait_s=wait_s):
                for index in group.pending:
                    await rollout.report(group, index, payload, reward=1.0, versions=0)
                    left -= 1
                if left <= 0:
                    break
            await rollout.flush()
            return {"began": began, "completions": completions - left}

        await obey(1, push=push)


async def trainer(address: str, size: int) -> None:
    """Fetches what each command is about, then commits it."""
    me = await Session.open(address, pb.ROLE_TRAINER)
    confirmation = pb.ConfirmResumeRequest(worker=me.identity, fresh=pb.FreshStart(), artifact_names=["policy.pt"])
    await me.stub.ConfirmResume(confirmation, timeout=CALL_S)
    stream, command = me.stream(), 0
    await stream.exchange(me.announcement())

    async def fetch(completions: int) -> Any:
        nonlocal command
        left = completions
        while left > 0:
            request = pb.NextCommandRequest(worker=me.identity, number=command + 1, wait={"seconds": 5})
            answer = await me.stub.NextCommand(request, timeout=CALL_S)
            if not answer.HasField("train"):
                continue
            command += 1
            fetched = 0
            fetch = pb.FetchPayloadsRequest(worker=me.identity, command=command)
            async for chunk in me.stub.FetchPayloads(fetch, timeout=CALL_S):
                for group in chunk.groups:
                    for completion in group.completions:
                        assert len(completion.inline) == size
                        fetched += 1
            assert fetched == sum(map(int.bit_count, answer.train.masks))
            left -= fetched
            await stream.exchange(me.completion(command, answer.train))
        return {"ended": time.monotonic()}

    await obey(1, fetch=fetch)


if __name__ == "__main__":
    run_child(
        {
            "relay": relay,
            "bare_worker": bare_worker,
            "bare_trainer": bare_trainer,
            "worker": worker,
            "trainer": trainer,
        }
    )
