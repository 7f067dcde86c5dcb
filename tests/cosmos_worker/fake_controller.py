"""A small honest controller for one process's tests: it keeps the protocol's promises and lets a test break the network.

It fences first, applies a batch number once, answers a numbered request the same again, and repeats notices until they are
confirmed. It runs on a thread and loop of its own, on a loopback port, and can be stopped and started again on that port with
or without its memory. Tests wait on its state (`until`), never on time.
"""

# ruff: noqa: ASYNC110  # its state changes on other threads, which an asyncio event does not see
from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import duration_pb2

from cosmos_ctrl.core.errors import (
    ConflictingRetryError,
    ControlError,
    NotRegisteredError,
    SequenceGapError,
    StaleExecutionError,
    SupersededError,
    UnknownWorkError,
)
from cosmos_ctrl.service.status import to_status
from cosmos_ctrl.v1 import checkpoint_pb2, reports_pb2
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1.controller_service_pb2_grpc import (
    ControllerServiceServicer,
    add_ControllerServiceServicer_to_server,
)
from cosmos_worker.settings import ClientConfig

DEADLINE_S = 20.0


@dataclass
class Process:
    """What the controller remembers of one incarnation."""

    place: tuple[Any, ...]
    dp_rank: int = 0
    asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Calls by name."""
    applied: list[bytes] = field(default_factory=list)
    notices: list[reports_pb2.Notice] = field(default_factory=list)
    leased: dict[int, pb.LeasePromptsResponse] = field(default_factory=dict)
    retired: bool = False
    registrations: int = 0


QUICK = ClientConfig(
    call_s=5.0,
    connect_total_s=10.0,
    not_ready_total_s=10.0,
    idle_total_s=20.0,
    poll_s=0.5,
    lease_wait_s=0.2,
    confirm_total_s=10.0,
    report_s=10.0,
    unfinished_total_s=10.0,
    close_s=10.0,
    silence_s=1.0,
    backoff_first_s=0.01,
    backoff_max_s=0.1,
)


class FakeController(ControllerServiceServicer):
    """See the module. Attributes are read by tests and changed through `change`."""

    def __init__(self, execution_id: str = "exec-1", *, lease_time_s: float = 30.0) -> None:
        self.execution_id = execution_id
        self.lease_time_s = lease_time_s
        self.limits = pb.Limits(max_message_bytes=64 << 20, max_unacknowledged_batches=8, max_batch_completions=4096)
        self.weights_announced = False
        self.processes: dict[str, Process] = {}
        self.holders: dict[tuple[Any, ...], str] = {}
        self.sessions: dict[str, str] = {}
        self.batches: list[reports_pb2.ReportBatch] = []
        self.heartbeats = 0
        self.messages = 0
        self.calls: dict[str, int] = defaultdict(int)
        # Work
        self.groups: deque[pb.LeasedGroup] = deque()
        self.weights: reports_pb2.WeightAnnouncement | None = None
        self.no_more = False
        # Training
        self.resume_state = pb.GetResumeStateResponse(run="test", execution_number=1, phase=pb.PHASE_AWAITING_AGREEMENT)
        self.ranks = 1
        self.confirmed: dict[str, pb.ConfirmResumeRequest] = {}
        self.commands: list[pb.NextCommandResponse] = []
        self.payloads: dict[int, list[pb.FetchPayloadsResponse]] = {}
        self.shards: list[pb.ReportShardsRequest] = []
        self.save_state = pb.SAVE_STATE_COMMITTED
        self.stops: list[str] = []
        # Faults
        self.lose_replies: dict[str, int] = defaultdict(int)
        self.errors: dict[str, deque[ControlError | grpc.StatusCode]] = defaultdict(deque)
        self.silent = False
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _loop, _context: None)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: grpc.aio.Server | None = None
        self._streams: set[asyncio.Task[Any]] = set()
        self.port = 0
        self._next_session = 0

    # --- the test's side ---

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> FakeController:
        self._run(self._start())
        return self

    def stop(self) -> None:
        self._run(self._stop())

    def restart(self) -> None:
        """The same controller, on the same port, after a moment in which it was not there."""
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def until(self, what: Callable[[], Any], describe: str = "") -> Any:
        """Wait until `what()` is true of this controller's state."""
        with self._changed:
            assert self._changed.wait_for(what, DEADLINE_S), f"never came about: {describe or what}"
            return what()

    def change(self, how: Callable[[], Any]) -> Any:
        """Change the state in one step, and let everyone look."""
        with self._changed:
            result = how()
            self._changed.notify_all()
        return result

    def lapse(self) -> None:
        """Forget every session; the incarnations are remembered."""
        self.change(self.sessions.clear)

    def notice(self, incarnation: str, **kind: Any) -> None:
        process = self.processes[incarnation]

        def add() -> None:
            process.notices.append(reports_pb2.Notice(number=self._noticed(process) + 1, **kind))

        self.change(add)

    def offer(self, *groups: pb.LeasedGroup) -> None:
        self.change(lambda: self.groups.extend(groups))

    def rows(self) -> list[tuple[str, int, int, int]]:
        """(outcome, group, lease, wide mask) of every rollout row applied, in order."""
        return [
            (
                reports_pb2.Outcome.Name(block.outcome).removeprefix("OUTCOME_"),
                group,
                block.leases[i],
                block.masks[i] << (64 * block.words[i] if block.words else 0),
            )
            for batch in self.batches
            for block in batch.rollouts
            for i, group in enumerate(block.groups)
        ]

    def _noticed(self, process: Process) -> int:
        return process.notices[-1].number if process.notices else getattr(process, "confirmed_notices", 0)

    # --- the server ---

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    async def _start(self) -> None:
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        add_ControllerServiceServicer_to_server(self, server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def _header(self) -> pb.ResponseHeader:
        return pb.ResponseHeader(execution_id=self.execution_id, revision=1)

    async def _begin(self, name: str, context: Any, worker: pb.WorkerIdentity | None = None) -> Process | None:
        """Count, fence, find the session, fail as scripted."""
        try:
            with self._changed:
                self.calls[name] += 1
                self._changed.notify_all()
                if worker is not None and self.execution_id and worker.execution_id != self.execution_id:
                    raise StaleExecutionError(stated=worker.execution_id, current=self.execution_id)
                if self.errors[name]:
                    error = self.errors[name].popleft()
                    if isinstance(error, ControlError):
                        raise error
                    await context.abort(error, "scripted")
                if worker is None:
                    return None
                incarnation = self.sessions.get(worker.session_id)
                if incarnation is None:
                    raise NotRegisteredError(session=worker.session_id)
                process = self.processes[incarnation]
                if process.retired:
                    raise SupersededError(place=str(process.place), incarnation=incarnation)
                process.asked[name] += 1
                return process
        except ControlError as error:
            await context.abort_with_status(to_status(error))
        return None

    async def _end(self, name: str, context: Any) -> None:
        with self._changed:
            lost = self.lose_replies[name] > 0
            if lost:
                self.lose_replies[name] -= 1
            self._changed.notify_all()
        if lost:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the reply is lost")

    async def _wait(self, ready: Callable[[], bool], wait: duration_pb2.Duration) -> None:
        end = self._loop.time() + wait.ToTimedelta().total_seconds()
        while not ready() and self._loop.time() < end:
            await asyncio.sleep(0.005)

    async def GetResumeState(self, request: Any, context: Any) -> Any:
        await self._begin("GetResumeState", context)
        response = pb.GetResumeStateResponse()
        response.CopyFrom(self.resume_state)
        response.header.CopyFrom(self._header())
        await self._end("GetResumeState", context)
        return response

    async def RegisterWorker(self, request: Any, context: Any) -> Any:
        stated = pb.WorkerIdentity(execution_id=request.execution_id) if request.execution_id else None
        if stated is not None and self.execution_id and stated.execution_id != self.execution_id:
            await context.abort_with_status(
                to_status(StaleExecutionError(stated=stated.execution_id, current=self.execution_id))
            )
        await self._begin("RegisterWorker", context)
        place = (request.role, request.group, request.replica, request.rank)

        def register() -> str | ControlError:
            process = self.processes.setdefault(request.incarnation, Process(place, request.dp_rank))
            if process.retired:
                return SupersededError(place=str(place), incarnation=request.incarnation)
            holder = self.holders.get(place)
            if holder not in (None, request.incarnation):
                self.processes[holder].retired = True
            self.holders[place] = request.incarnation
            process.registrations += 1
            self._next_session += 1
            session = f"session-{self._next_session}"
            self.sessions[session] = request.incarnation
            return session

        session = self.change(register)
        if isinstance(session, ControlError):
            await context.abort_with_status(to_status(session))
        await self._end("RegisterWorker", context)
        lease_time = duration_pb2.Duration()
        lease_time.FromMilliseconds(int(self.lease_time_s * 1000))
        return pb.RegisterWorkerResponse(
            header=self._header(),
            session_id=session,
            lease_time=lease_time,
            applied=len(self.processes[request.incarnation].applied),
            limits=self.limits,
            weights_announced=self.weights_announced,
            leader=request.role == pb.ROLE_TRAINER and request.group == "policy" and request.rank == 0,
        )

    def _apply(self, process: Process, request: Any) -> reports_pb2.ReportAck:
        while process.notices and process.notices[0].number <= request.notices_through:
            process.confirmed_notices = process.notices.pop(0).number  # type: ignore[attr-defined]
        self.messages += 1
        if not request.HasField("batch"):
            self.heartbeats += 1
        else:
            batch = request.batch
            content = batch.SerializeToString(deterministic=True)
            if batch.number <= len(process.applied):
                if process.applied[batch.number - 1] != content:
                    raise ConflictingRetryError(what="batch", number=batch.number)
            elif batch.number != len(process.applied) + 1:
                raise SequenceGapError(what="batch", expected=len(process.applied) + 1, found=batch.number)
            elif any(group == 0 for block in batch.rollouts for group in block.groups):
                raise UnknownWorkError(what="group 0")
            else:
                process.applied.append(content)
                kept = reports_pb2.ReportBatch()
                kept.CopyFrom(batch)
                self.batches.append(kept)
        return reports_pb2.ReportAck(applied=len(process.applied), notices=process.notices)

    async def StreamReports(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            process = await self._begin("StreamReports", context, request.worker)
            assert process is not None
            while self.silent:
                await asyncio.sleep(0.005)
            try:
                ack = self.change(lambda process=process, request=request: self._apply(process, request))
            except ControlError as error:
                await context.abort_with_status(to_status(error))
            await self._end("StreamReports", context)
            yield pb.StreamReportsResponse(header=self._header(), ack=ack)

    async def LeasePrompts(self, request: Any, context: Any) -> Any:
        process = await self._begin("LeasePrompts", context, request.worker)
        assert process is not None
        if request.number not in process.leased:
            await self._wait(lambda: bool(self.groups) or self.no_more, request.wait)

            def lease() -> None:
                assert request.number == len(process.leased) + 1
                response = pb.LeasePromptsResponse(header=self._header(), weights=self.weights)
                while self.groups and len(response.groups) < request.max_groups:
                    response.groups.append(self.groups.popleft())
                response.no_more = self.no_more and not self.groups
                process.leased[request.number] = response

            self.change(lease)
        await self._end("LeasePrompts", context)
        return process.leased[request.number]

    async def ConfirmResume(self, request: Any, context: Any) -> Any:
        await self._begin("ConfirmResume", context, request.worker)
        incarnation = self.sessions[request.worker.session_id]
        self.change(lambda: self.confirmed.__setitem__(incarnation, request))
        await self._wait(lambda: len(self.confirmed) >= self.ranks, request.wait)
        await self._end("ConfirmResume", context)
        agreed = len(self.confirmed) >= self.ranks
        return pb.ConfirmResumeResponse(header=self._header(), agreed=agreed, missing=[] if agreed else ["policy/1"])

    async def NextCommand(self, request: Any, context: Any) -> Any:
        await self._begin("NextCommand", context, request.worker)
        await self._wait(lambda: len(self.commands) >= request.number, request.wait)
        await self._end("NextCommand", context)
        response = pb.NextCommandResponse()
        if len(self.commands) >= request.number:
            response.CopyFrom(self.commands[request.number - 1])
        response.header.CopyFrom(self._header())
        return response

    async def FetchPayloads(self, request: Any, context: Any) -> Any:
        process = await self._begin("FetchPayloads", context, request.worker)
        assert process is not None
        train = self.commands[request.command - 1].train
        share = {group for group, rank in zip(train.groups, train.dp_ranks, strict=True) if rank == process.dp_rank}
        for whole in self.payloads[request.command]:
            groups = [group for group in whole.groups if group.group in share]
            yield pb.FetchPayloadsResponse(header=self._header(), groups=groups)
            await self._end("FetchPayloads", context)

    async def ReportShards(self, request: Any, context: Any) -> Any:
        await self._begin("ReportShards", context, request.worker)
        self.change(lambda: self.shards.append(request))
        await self._end("ReportShards", context)
        return pb.ReportShardsResponse(
            header=self._header(), state=self.save_state, manifest_digest="sha256:" + "0" * 64
        )

    async def RequestStop(self, request: Any, context: Any) -> Any:
        await self._begin("RequestStop", context, request.worker)
        self.change(lambda: self.stops.append(request.reason))
        await self._end("RequestStop", context)
        return pb.RequestStopResponse(header=self._header(), phase=pb.PHASE_DRAINING, reason=self.stops[0])


def group(number: int, completions: int = 4, *, lease: int | None = None, **fields: Any) -> pb.LeasedGroup:
    """A leased group with everything to generate."""
    masks = [(1 << min(64, completions - first)) - 1 for first in range(0, completions, 64)]
    return pb.LeasedGroup(
        group=number,
        lease=100 + number if lease is None else lease,
        prompt_key=f"prompt-{number}",
        completions=completions,
        masks=masks,
        **fields,
    )


def train(step: int, groups: dict[int, int], dp_ranks: list[int] | None = None) -> pb.NextCommandResponse:
    """A TRAIN command over groups with their masks."""
    return pb.NextCommandResponse(
        train=pb.TrainCommand(
            step=step,
            groups=list(groups),
            masks=list(groups.values()),
            dp_ranks=dp_ranks or [0] * len(groups),
        )
    )


def payloads(groups: dict[int, int]) -> pb.FetchPayloadsResponse:
    """The payloads of these groups."""
    return pb.FetchPayloadsResponse(
        groups=[
            pb.GroupPayloads(
                group=number,
                prompt_key=f"prompt-{number}",
                completions=[
                    pb.CompletionPayload(completion=i, reward=float(i), inline=b"[1,2]", codec="json")
                    for i in range(64)
                    if mask >> i & 1
                ],
            )
            for number, mask in groups.items()
        ]
    )


def save(
    step: int, path: str = "checkpoints/e1-s1", *, updates: int = 0, final: bool = False
) -> pb.NextCommandResponse:
    """A SAVE command."""
    return pb.NextCommandResponse(
        save=pb.SaveCommand(
            checkpoint_id="ck",
            path=path,
            completed_training_steps=step,
            completed_optimizer_updates=updates,
            execution_number=1,
            metadata=metadata(step, path),
            final=final,
        )
    )


def end(reason: Any = pb.END_REASON_BUDGET_EXHAUSTED, steps: int = 0, message: str = "") -> pb.NextCommandResponse:
    """An END command."""
    return pb.NextCommandResponse(end=pb.EndCommand(reason=reason, message=message, completed_training_steps=steps))


def metadata(steps: int, path: str, *, updates: int = 0) -> checkpoint_pb2.ResumeMetadata:
    """Resume metadata."""
    return checkpoint_pb2.ResumeMetadata(
        schema_version=1,
        checkpoint_path=path,
        checkpoint_id="ck",
        completed_training_steps=steps,
        completed_optimizer_updates=updates,
        remaining_completions=10,
        epoch=1,
        sampling_owner=checkpoint_pb2.SAMPLING_OWNER_SAMPLER,
        sampler_state=checkpoint_pb2.SamplerState(data=b"{}", codec="json"),
    )
