"""The RPCs. No policy: each checks in with the core, calls one method of it, and translates the answer.

Until the sampler is restored there is no core, and everything answers RESTORING.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from cosmos_ctrl.checkpoints.discovery import explain, list_checkpoints
from cosmos_ctrl.core.commands import Command, End, Save, Train
from cosmos_ctrl.core.controller import Acknowledgement, Controller
from cosmos_ctrl.core.errors import (
    CheckpointNotFoundError,
    MalformedError,
    RestoringError,
)
from cosmos_ctrl.core.leasing import LeaseReply
from cosmos_ctrl.service import convert, messages, wire
from cosmos_ctrl.service.metadata import metadata_to_message
from cosmos_ctrl.service.runtime import Runtime
from cosmos_ctrl.v1 import checkpoint_pb2, reports_pb2
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceServicer

#: Longest wait of one call, in seconds: a client that wants more asks again.
MAX_WAIT_S = 60.0

#: Payload bytes in one response of FetchPayloads.
PAYLOAD_CHUNK_BYTES = 4 << 20

#: A watcher sees at most ten states a second: each would otherwise cost as much as a report.
_WATCH_PAUSE_S = 0.1

_DEFAULT_PAGE, _LARGEST_PAGE, _LONGEST_TOKEN = 100, 1000, 20

M = TypeVar("M")


class ControllerServicer(ControllerServiceServicer):
    """Serves one execution."""

    def __init__(self) -> None:
        self._attached: Runtime | None = None

    def attach(self, runtime: Runtime) -> None:
        """The sampler is restored: serve."""
        self._attached = runtime

    @property
    def _runtime(self) -> Runtime:
        if self._attached is None:
            raise RestoringError
        return self._attached

    @property
    def _core(self) -> Controller:
        return self._runtime.controller

    # -- the run

    async def GetResumeState(self, request: pb.GetResumeStateRequest, context: Any) -> pb.GetResumeStateResponse:
        """See the proto."""
        core, info = self._core, self._runtime.info
        state = core.statistics()
        response = pb.GetResumeStateResponse(
            header=self._header(),
            run=info.name,
            run_uri=info.uri,
            execution_number=core.identity.number,
            phase=pb.Phase.Value(f"PHASE_{state.phase}"),
            limits=self._limits(),
            horizon_training_steps=core.horizon_training_steps,
        )
        if core.resumed is not None:
            response.metadata.CopyFrom(metadata_to_message(core.resumed.metadata))
            response.manifest_digest = core.resumed.manifest_digest
            response.application_note = core.resumed.application_note
            response.resharded_groups.extend(core.resumed.resharded_groups)
            response.repeat_bound_completions = core.resumed.repeat_bound_completions
        if state.end is not None:
            response.end.CopyFrom(messages.end_to_message(*state.end, state.completed_training_steps))
        return response

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        """See the proto."""
        runtime = self._runtime
        while True:
            # Both before the message is handed over, which may take long: what ends meanwhile is the next message.
            seen, last = runtime.revisions.current, self._core.lifecycle.over
            yield pb.WatchRunResponse(header=self._header(), state=self._state())
            if last:
                return
            await asyncio.sleep(_WATCH_PAUSE_S)
            await runtime.revisions.beyond(seen, MAX_WAIT_S)

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Any) -> pb.ListWorkersResponse:
        """See the proto."""
        workers = sorted(self._core.workers, key=lambda worker: worker.place)
        page, token = _page(workers, request.page_size, request.page_token)
        return pb.ListWorkersResponse(
            header=self._header(),
            workers=[messages.worker_to_message(w, self._core.workers.silence_s(w)) for w in page],
            next_page_token=token,
        )

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Any) -> pb.ListCheckpointsResponse:
        """See the proto."""
        store = self._runtime.store
        found = await asyncio.to_thread(list_checkpoints, store) if store else ()
        page, token = _page(found, request.page_size, request.page_token)
        return pb.ListCheckpointsResponse(
            header=self._header(),
            checkpoints=[messages.checkpoint_to_message(f.path, f.manifest, f.manifest_digest) for f in page],
            next_page_token=token,
        )

    async def ExplainResume(self, request: pb.ExplainResumeRequest, context: Any) -> pb.ExplainResumeResponse:
        """See the proto."""
        store, info = self._runtime.store, self._runtime.info
        if store is None:
            raise CheckpointNotFoundError(path=info.uri)
        found = await asyncio.to_thread(
            explain, store, compatibility=info.compatibility, on_corrupt=info.on_corrupt, topology=info.topology
        )
        page, token = _page(found.candidates, request.page_size, request.page_token)
        return pb.ExplainResumeResponse(
            header=self._header(), candidates=map(messages.candidate_to_message, page), next_page_token=token
        )

    # -- workers

    async def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: Any) -> pb.RegisterWorkerResponse:
        """See the proto."""
        core = self._core
        if request.execution_id:
            core.pass_fence(request.execution_id)
        worker = self._settled(lambda: core.register(request.execution_id, convert.worker_from_message(request)))
        return pb.RegisterWorkerResponse(
            header=self._header(),
            session_id=worker.session,
            lease_time=messages.duration(core.policy.session_ttl_s),
            applied=worker.log.applied,
            limits=self._limits(),
            weights_announced=core.policy.announces_weights,
            leader=worker.place == core.commands.leader,
        )

    async def SubmitReports(self, request: pb.SubmitReportsRequest, context: Any) -> pb.SubmitReportsResponse:
        """See the proto."""
        ack = self._apply(request)
        return pb.SubmitReportsResponse(header=self._header(), ack=ack)

    async def StreamReports(  # type: ignore[override]  # reads and writes itself: a fifth cheaper a message than two iterators
        self, request_iterator: AsyncIterator[pb.StreamReportsRequest], context: Any
    ) -> None:
        """See the proto."""
        while (request := await context.read()) is not grpc.aio.EOF:
            ack = self._apply(request)
            await context.write(pb.StreamReportsResponse(header=self._header(), ack=ack))

    def _apply(self, request: pb.SubmitReportsRequest | pb.StreamReportsRequest) -> reports_pb2.ReportAck:
        core, identity = self._core, request.worker
        what = "report" if request.HasField("batch") else "heartbeat"
        core.hear(identity.execution_id, identity.session_id, what)
        confirmed = (request.acked_through, request.notices_through)

        def apply() -> Acknowledgement:
            if not request.HasField("batch"):
                return core.heartbeat(identity.execution_id, identity.session_id, *confirmed)
            batch = convert.batch_from_message(request.batch)
            return core.submit(identity.execution_id, identity.session_id, *confirmed, batch)

        return messages.ack_to_message(self._settled(apply), core.policy.max_message_bytes // 2)

    # -- rollouts

    async def LeasePrompts(self, request: pb.LeasePromptsRequest, context: Any) -> pb.LeasePromptsResponse:
        """See the proto."""
        core, identity = self._core, request.worker
        core.hear(identity.execution_id, identity.session_id)

        def attempt(last_call: bool) -> LeaseReply | None:
            return core.lease(
                identity.execution_id,
                identity.session_id,
                request.number,
                request.max_groups,
                last_call=last_call,
            )

        reply = await self._runtime.until(self._runtime.leases, identity.session_id, attempt, _wait(request.wait))
        assert reply is not None, "the last call always answers"
        return pb.LeasePromptsResponse(
            header=self._header(),
            groups=map(messages.lease_to_message, reply.leases),
            weights=messages.weights_to_message(reply.weights) if reply.weights else None,
            no_more=reply.no_more,
        )

    # -- trainers

    async def ConfirmResume(self, request: pb.ConfirmResumeRequest, context: Any) -> pb.ConfirmResumeResponse:
        """See the proto."""
        core, identity = self._core, request.worker
        core.hear(identity.execution_id, identity.session_id)
        if request.WhichOneof("restored") == "damaged":
            damaged = request.damaged
            self._settled(
                lambda: core.report_damage(
                    identity.execution_id, identity.session_id, damaged.name, damaged.explanation
                )
            )
            return pb.ConfirmResumeResponse(header=self._header())
        restored = convert.restored_from_message(request)
        missing: tuple[str, ...] = ()

        def attempt(_last_call: bool) -> bool | None:
            nonlocal missing
            missing = core.confirm(identity.execution_id, identity.session_id, restored)
            return None if missing else True

        agreed = await self._runtime.until(
            self._runtime.confirmations, identity.session_id, attempt, _wait(request.wait)
        )
        return pb.ConfirmResumeResponse(header=self._header(), agreed=bool(agreed), missing=missing)

    async def NextCommand(self, request: pb.NextCommandRequest, context: Any) -> pb.NextCommandResponse:
        """See the proto."""
        core, identity = self._core, request.worker
        core.hear(identity.execution_id, identity.session_id)

        def attempt(_last_call: bool) -> Command | None:
            return core.next_command(identity.execution_id, identity.session_id, request.number)

        command = await self._runtime.until(self._runtime.commands, identity.session_id, attempt, _wait(request.wait))
        response = pb.NextCommandResponse(header=self._header())
        if isinstance(command, Train):
            response.train.CopyFrom(messages.train_to_message(command, core.dp_size(identity.session_id)))
        elif isinstance(command, Save):
            owner = self._runtime.info.sampling_owner
            message = messages.save_to_message(
                command,
                owner,
                execution_number=core.identity.number,
                horizon_training_steps=core.horizon_training_steps,
            )
            response.save.CopyFrom(message)
        elif isinstance(command, End):
            response.end.CopyFrom(messages.end_command_to_message(command))
        return response

    async def FetchPayloads(  # type: ignore[override]  # encoded by itself, so that a payload is copied once
        self, request: pb.FetchPayloadsRequest, context: Any
    ) -> AsyncIterator[bytes]:
        """See the proto."""
        core, identity = self._core, request.worker
        core.hear(identity.execution_id, identity.session_id)
        share = request.dp_rank if request.HasField("dp_rank") else None
        groups = core.payloads(identity.execution_id, identity.session_id, request.command, share)
        for parts in messages.payload_parts(groups, self._chunk_bytes):
            header = wire.field(pb.FetchPayloadsResponse, "header", [self._header().SerializeToString()])
            yield b"".join(header + parts)

    async def ReportShards(self, request: pb.ReportShardsRequest, context: Any) -> pb.ReportShardsResponse:
        """See the proto."""
        core, identity = self._core, request.worker
        core.hear(identity.execution_id, identity.session_id)
        fenced = (identity.execution_id, identity.session_id, request.command)
        kind = request.WhichOneof("outcome")
        report: Callable[[], Save]
        if kind == "receipts":
            receipts = convert.receipts_from_message(request.receipts)
            note = convert.note_from_message(request.receipts)
            report = partial(core.report_receipts, *fenced, receipts, note)
        elif kind == "abandoned":
            report = partial(core.report_abandoned, *fenced, request.abandoned.reason)
        elif kind == "committed":
            report = partial(core.report_committed, *fenced, request.committed.checkpoint_path)
        else:
            raise MalformedError(what="neither receipts nor abandoned nor committed")

        def attempt(last_call: bool) -> Save | None:
            # The last rank's answer comes after publication. Saying the same again changes nothing, and hears of a failure.
            save = report()
            return save if last_call or save.state != "PUBLISHING" else None

        save = await self._runtime.until(self._runtime.saves, identity.session_id, attempt, MAX_WAIT_S)
        assert save is not None, "the last call always answers"
        return pb.ReportShardsResponse(
            header=self._header(),
            state=pb.SaveState.Value(f"SAVE_STATE_{save.state}"),
            manifest_digest=save.manifest_digest,
        )

    async def RequestStop(self, request: pb.RequestStopRequest, context: Any) -> pb.RequestStopResponse:
        """See the proto."""
        core, identity = self._core, request.worker
        core.pass_fence(identity.execution_id)
        grace = convert.seconds(request.deadline) if request.HasField("deadline") else None
        reason = self._settled(
            lambda: core.request_stop(identity.execution_id, identity.session_id, request.reason, grace)
        )
        phase = pb.Phase.Value(f"PHASE_{core.lifecycle.phase}")
        return pb.RequestStopResponse(header=self._header(), phase=phase, reason=reason)

    # -- parts

    def _settled(self, event: Any) -> Any:
        try:
            return event()
        finally:
            self._runtime.settle()

    @property
    def _chunk_bytes(self) -> int:
        return min(PAYLOAD_CHUNK_BYTES, self._core.policy.max_message_bytes // 2)

    def _header(self) -> pb.ResponseHeader:
        core = self._core
        return pb.ResponseHeader(execution_id=core.identity.id, revision=core.lifecycle.revision)

    def _limits(self) -> pb.Limits:
        policy = self._core.policy
        return pb.Limits(
            max_message_bytes=policy.max_message_bytes,
            max_unacknowledged_batches=policy.max_unacknowledged_batches,
            max_batch_completions=policy.max_batch_completions,
            max_training_steps=policy.max_training_steps,
        )

    def _state(self) -> pb.RunState:
        state = self._core.statistics()
        return messages.state_to_message(state, self._core.identity.number, self._checkpoint())

    def _checkpoint(self) -> checkpoint_pb2.Checkpoint | None:
        save, resumed = self._core.training.last_save, self._core.resumed
        if save is not None:
            return messages.save_to_checkpoint(save, self._core.identity.number, resumed)
        if resumed is not None:
            return checkpoint_pb2.Checkpoint(
                checkpoint_id=resumed.metadata.checkpoint_id,
                path=resumed.metadata.checkpoint_path,
                manifest_digest=resumed.manifest_digest,
                completed_training_steps=resumed.metadata.completed_training_steps,
                completed_optimizer_updates=resumed.metadata.completed_optimizer_updates,
            )
        return None


def _wait(message: Any) -> float:
    return min(convert.seconds(message), MAX_WAIT_S)


def _page(items: Any, size: int, token: str) -> tuple[Any, str]:
    if token and not (token.isdecimal() and len(token) < _LONGEST_TOKEN):
        raise MalformedError(what=f"page token {token!r}")
    start = int(token or 0)
    end = start + min(size or _DEFAULT_PAGE, _LARGEST_PAGE)
    return items[start:end], str(end) if end < len(items) else ""
