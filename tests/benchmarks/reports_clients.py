"""Clients of a benchmark: by the stubs alone, with messages made beforehand, and the product's own.

* A message is sent as bytes, so what a client costs in the timed part is the transport's.
* Closed loop: the next message goes out when an earlier one is acknowledged. Open loop: messages are due at times of a
  schedule, and an ack's latency counts from there, whatever held the message up.
* A refused row or another execution's answer ends the benchmark.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from reports_processes import obey, run_child

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from cosmos_worker.rollout import Rollout
from cosmos_worker.settings import Endpoint, WorkerPlace

STREAM = "/cosmos_ctrl.v1.ControllerService/StreamReports"
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
)
CALL_S = 60.0
OPEN_WINDOW = 48
"""Most messages unacknowledged in an open loop; the controller allows 64."""
LEASED_AT_ONCE = 2048

Lease = tuple[int, int, int]
"""Group, lease number, mask."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of messages on one stream."""

    latencies: list[float]
    """Of each, in seconds."""
    began: float
    ended: float


@dataclass(slots=True)
class Session:
    """One worker process's session, over a connection of its own."""

    channel: grpc.aio.Channel
    stub: Any
    identity: pb.WorkerIdentity
    leases: list[Lease] = field(default_factory=list)
    batches: int = 0
    requests: int = 0

    @classmethod
    async def open(cls, address: str, role: pb.Role.ValueType, replica: int = 0) -> Session:
        channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        stub: Any = ControllerServiceStub(channel)
        group = "policy" if role == pb.ROLE_TRAINER else "pool"
        request = pb.RegisterWorkerRequest(
            role=role, group=group, replica=replica, world_size=1, incarnation=secrets.token_hex(16)
        )
        answer = await stub.RegisterWorker(request, timeout=CALL_S, wait_for_ready=True)
        identity = pb.WorkerIdentity(execution_id=answer.header.execution_id, session_id=answer.session_id)
        return cls(channel, stub, identity)

    async def lease(self, groups: int, wait_s: int = 60) -> int:
        """Hold `groups` more; returns how many came before one request waited in vain."""
        held = len(self.leases)
        while (left := held + groups - len(self.leases)) > 0:
            self.requests += 1
            request = pb.LeasePromptsRequest(
                worker=self.identity,
                number=self.requests,
                max_groups=min(left, LEASED_AT_ONCE),
                wait={"seconds": wait_s},
            )
            answer = await self.stub.LeasePrompts(request, timeout=CALL_S + wait_s)
            self.leases += [(group.group, group.lease, group.masks[0]) for group in answer.groups]
            if not answer.groups:
                break
        return len(self.leases) - held

    def message(self, leases: Sequence[Lease], window: int, payloads: Sequence[bytes] = ()) -> bytes:
        """The next batch: completions of `leases`, sent when all but `window` before it are acknowledged."""
        request = self._request(window)
        # In place: a message that is put into another one is copied.
        rows = request.batch.rollouts.add(
            outcome=reports_pb2.OUTCOME_COMPLETED,
            groups=[group for group, _, _ in leases],
            leases=[lease for _, lease, _ in leases],
            masks=[mask for _, _, mask in leases],
            lowest_versions=[0] * len(leases),
            highest_versions=[0] * len(leases),
            payload_codec="bytes" if payloads else "",
            payloads=payloads,
        )
        rows.rewards.extend([random.random() for _ in range(sum(mask.bit_count() for _, _, mask in leases))])
        return request.SerializeToString()

    def announcement(self) -> bytes:
        """The next batch of a leader: the weights that the run begins with."""
        request = self._request(1)
        request.batch.weights.add(version=0, handle="memory")
        return request.SerializeToString()

    def completion(self, command: int, train: pb.TrainCommand) -> bytes:
        """The next batch of a leader: all of `train` is trained."""
        request = self._request(1)
        report = request.batch.completions.add(command=command, completed_training_step=train.step, optimizer_updates=1)
        report.rows.add(
            disposition=reports_pb2.DISPOSITION_TRAINED, groups=train.groups, words=train.words, masks=train.masks
        )
        return request.SerializeToString()

    def _request(self, window: int) -> pb.StreamReportsRequest:
        self.batches += 1
        request = pb.StreamReportsRequest(worker=self.identity, acked_through=max(0, self.batches - window))
        request.batch.number = self.batches
        return request

    def stream(self) -> Stream:
        """A report stream."""
        return Stream(self.channel.stream_stream(STREAM)())


class Stream:
    """A report stream of bytes."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.write = call.write

    async def read(self) -> int:
        """The next ack's highest batch.

        Raises:
            RuntimeError: a row was refused.
        """
        data = await self._call.read()
        if data is grpc.aio.EOF:
            await self._call.code()
            raise RuntimeError(f"the stream ended: {await self._call.details()}")
        ack = pb.StreamReportsResponse.FromString(data).ack
        if ack.notices:
            raise RuntimeError(f"refused: {ack.notices[0]}")
        return ack.applied

    async def exchange(self, message: bytes) -> int:
        """Write one and read its ack."""
        await self.write(message)
        return await self.read()

    async def send(self, messages: Sequence[bytes], due: Sequence[float], window: int) -> Sent:
        """Send each when it is due (or at once, if nothing is) and at most `window` are unacknowledged; read every ack."""
        room, sent, latencies = asyncio.Semaphore(window), list[float](), list[float]()

        async def write() -> None:
            for index, message in enumerate(messages):
                if due and (left := due[index] - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                await room.acquire()
                sent.append(due[index] if due else time.monotonic())
                await self.write(message)

        writing = asyncio.ensure_future(write())
        for index in range(len(messages)):
            await self.read()
            latencies.append(time.monotonic() - sent[index])
            room.release()
        await writing
        return Sent(latencies, sent[0], time.monotonic())


def whole_groups(session: Session, batches: int, rows: int, window: int) -> list[bytes]:
    """Batches of `rows` whole groups each."""
    return [session.message(session.leases[at * rows : (at + 1) * rows], window) for at in range(batches)]


def single_reports(session: Session, batches: int, rows: int, window: int) -> list[bytes]:
    """Batches of one completion each; `rows` of them are a group."""
    messages = []
    for group, lease, mask in session.leases[: batches // rows]:
        messages += [session.message([(group, lease, 1 << bit)], window) for bit in range(mask.bit_length())]
    return messages


def ten_reports(session: Session, batches: int, rows: int, window: int) -> list[bytes]:
    """Batches of one completion each of ten groups; after `rows` of them the groups are complete."""
    messages = []
    for at in range(batches):
        groups = session.leases[at // rows * 10 :][:10]
        messages.append(session.message([(group, lease, 1 << at % rows) for group, lease, _ in groups], window))
    return messages


SHAPES = {"ten": ten_reports, "whole groups": whole_groups, "single": single_reports}


async def workers(address: str, sessions: int, first: int = 0) -> None:
    """Some rollout workers."""
    mine = [await Session.open(address, pb.ROLE_ROLLOUT, first + index) for index in range(sessions)]
    streams = [session.stream() for session in mine]
    for session, stream in zip(mine, streams, strict=True):
        await stream.exchange(pb.StreamReportsRequest(worker=session.identity).SerializeToString())
    prepared: list[list[bytes]] = []

    async def prepare(shape: str, batches: int, rows: int, groups: int, window: int) -> None:
        # One after the other: the groups of a command are then of several workers.
        for session in mine:
            session.leases.clear()
            await session.lease(groups)
        prepared[:] = [SHAPES[shape](session, batches, rows, window) for session in mine]

    async def send(window: int, per_s: float = 0.0) -> Any:
        """All of it; `per_s` messages a second of all sessions, or as fast as they are acknowledged."""
        start_at = time.monotonic() + 0.1

        def due(index: int, count: int) -> list[float]:
            return [start_at + (index + number * sessions) / per_s for number in range(count)] if per_s else []

        all_sent = await asyncio.gather(
            *(
                stream.send(messages, due(index, len(messages)), window)
                for index, (stream, messages) in enumerate(zip(streams, prepared, strict=True))
            )
        )
        return {
            "began": min(sent.began for sent in all_sent),
            "ended": max(sent.ended for sent in all_sent),
            "latencies": [latency for sent in all_sent for latency in sent.latencies],
        }

    await obey(len(mine), prepare=prepare, send=send)


async def trainer(address: str) -> None:
    """The one trainer rank: it confirms, announces the first weights, and commits each step as soon as it is told."""
    me = await Session.open(address, pb.ROLE_TRAINER)
    confirmation = pb.ConfirmResumeRequest(worker=me.identity, fresh=pb.FreshStart(), artifact_names=["policy.pt"])
    await me.stub.ConfirmResume(confirmation, timeout=CALL_S)
    stream, command = me.stream(), 0
    await stream.exchange(me.announcement())

    async def settle(completions: int) -> Any:
        nonlocal command
        left, steps = completions, 0
        while left > 0:
            request = pb.NextCommandRequest(worker=me.identity, number=command + 1, wait={"seconds": 5})
            answer = await me.stub.NextCommand(request, timeout=CALL_S)
            if not answer.HasField("train"):
                continue
            command, steps = command + 1, steps + 1
            await stream.exchange(me.completion(command, answer.train))
            left -= sum(map(int.bit_count, answer.train.masks))
        return {"ended": time.monotonic(), "steps": steps, "over": -left}

    async def state() -> Any:
        watching = me.stub.WatchRun(pb.WatchRunRequest(), timeout=CALL_S)
        counts = (await watching.read()).state
        watching.cancel()  # or the controller would go on to tell of every change
        return {
            "trained": counts.trained_completions,
            "lost": counts.lease_lost + counts.discarded_completions + counts.stale_refused,
            "ready": counts.groups_ready,
        }

    await obey(me.identity.execution_id, settle=settle, state=state)


async def rollout_client(address: str) -> None:
    """The product's own client, one worker."""
    place = WorkerPlace(role="rollout", group="product")
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(Rollout(Endpoint(address=address), place))
        held: list[Any] = []

        async def prepare(groups: int) -> None:
            async for group in worker.groups(in_flight=groups):
                held.append(group)
                if len(held) == groups:
                    break
            # Or it would lease the next ones while these are reported.
            worker._leasing.set_in_flight(1)

        async def send() -> Any:
            rewards = [random.random() for _ in held[0].pending]
            began = time.monotonic()
            for group in held:
                await worker.report_group(group, rewards=rewards, versions=0)
            await worker.flush()
            held.clear()
            return {"began": began, "ended": time.monotonic()}

        await obey(1, prepare=prepare, send=send)


if __name__ == "__main__":
    gc.disable()  # what is measured here is the server
    run_child({"workers": workers, "trainer": trainer, "rollout_client": rollout_client})
