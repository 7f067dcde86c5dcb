"""A conformance worker from raw stubs, and its broken relatives: ``mutant_worker.py [BUG]``.

It is the smallest client that passes: one thread, one call at a time, reports by SubmitReports. With a bug's name it does that one thing
wrong, so that a test can show which rule catches it.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import time
from collections import deque
from typing import Any, NoReturn

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub

#: What each broken relative does wrong.
BUGS = {
    "renumbers_resends": "a batch that is sent again has the next number",
    "changes_resends": "a batch that is sent again has other bytes",
    "skips_a_number": "batch 2 is numbered 3",
    "skips_a_lease_number": "the second request for leases is numbered 3",
    "new_lease_number_on_resend": "a request for leases that is sent again has the next number",
    "adopts_executions": "registers as a fresh process when it is told that its execution is over",
    "ignores_headers": "does not look at the execution ID of an answer",
    "retries_stale": "tries again after STALE_EXECUTION",
    "retries_everything": "tries again after every refusal",
    "ignores_retry_info": "tries again at once",
    "wrong_exit_code": "ends with 1 whatever the reason",
    "exits_10_for_everything": "ends with 10 whatever the reason",
    "drops_unacknowledged": "lets go of what is unacknowledged when it registers again",
    "new_incarnation": "makes a new incarnation when it registers again",
    "old_session": "goes on with the session before the newest",
    "confirms_unheard_notices": "confirms one notice more than it was told",
    "confirms_nothing": "confirms neither batches nor notices",
    "confirms_unacknowledged": "confirms a batch that was not acknowledged",
    "trusts_any_answer": "takes any answer to a batch for its acknowledgement",
    "no_heartbeats": "is silent while it has nothing to report",
    "no_deadline": "calls without a deadline",
    "no_end": "ends without an end report",
    "does_not_wait": "ends without waiting for the acknowledgement of its end",
    "keeps_what_is_held": "ends on SIGTERM without returning what it holds",
    "ignores_sigterm": "goes on after SIGTERM",
    "ignores_masks": "generates the whole group, whatever the masks say",
    "first_word_only": "generates the first 64 completions of a group",
    "wrong_payload": "forgets the index in the payload",
    "wrong_reward": "gives every completion the same reward",
    "wrong_version": "states version 0 whatever was announced",
    "leases_too_much": "asks for more groups than it may hold",
    "leases_after_no_more": "asks for leases after no_more",
    "reports_twice": "reports every completion in two batches",
    "reports_cancelled": "returns what was cancelled",
    "ignores_sources": "completes everything",
    "batches_too_large": "reports everything that it has in one batch",
    "ignores_bytes": "fills a batch to its number of completions, however many bytes they are",
    "final_later": "ends at the first refusal, whatever RetryInfo says",
    "final_outage": "ends at the first call that nobody answers",
    "final_cancelled": "ends at CANCELLED",
    "heartbeats_unheard": "does not look at the execution ID of an answer to a heartbeat",
    "ignores_expected": "sends again from batch 1 after SEQUENCE_GAP, whatever is expected",
    "unknown_notice_fatal": "ends at a notice that it does not know",
    "unknown_refusal_fatal": "ends at a row that is refused for a reason that it does not know",
    "no_address_is_an_error": "ends with 11 where no address is set",
}

#: The library's own answers after which the same is sent again.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

#: Bounds of what a message has beside its rows, and of what a row's key and size take.
_MESSAGE_BYTES, _ROW_BYTES = 1024, 8

_GO_ON = 0.05
_CALL_S = 10.0


def ends(code: int, why: str, bug: str) -> NoReturn:
    print(why, file=sys.stderr, flush=True)
    codes = {"wrong_exit_code": 1, "exits_10_for_everything": 10}
    os._exit(codes.get(bug, code))


class Worker:
    """One process."""

    def __init__(self, address: str, bug: str) -> None:
        options = [
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 200),
        ]
        self.stub = ControllerServiceStub(grpc.insecure_channel(address, options))
        self.bug = bug
        self.pinned = os.environ.get("COSMOS_CTRL_EXECUTION_ID", "")
        self.in_flight = int(os.environ.get("COSMOS_CTRL_IN_FLIGHT", "8"))
        self.incarnation = secrets.token_hex(16)
        self.session = self.older_session = ""
        self.limits = pb.Limits()
        self.lease_time_s = 1.0
        self.heard_at = 0.0
        self.requests = 0
        self.no_more = False
        self.version = 0
        self.held: dict[int, pb.LeasedGroup] = {}
        self.met: set[str] = set()
        self.pending: deque[reports_pb2.RolloutRows] = deque()
        self.unacknowledged: deque[reports_pb2.ReportBatch] = deque()
        self.batches = self.applied = self.notices = 0
        self.told = 0
        self.beats = self.rewinds = False
        self.first: reports_pb2.ReportBatch | None = None
        signal.signal(signal.SIGTERM, self.terminate)

    def terminate(self, *_: object) -> None:
        self.told += 1
        if self.told > 1:
            ends(11, "told twice", self.bug)

    # -- calls

    def call(self, method: Any, build: Any, wait_s: float = 0.0) -> Any:
        """Until it is answered."""
        failures, since = 0, time.monotonic()
        while True:
            try:
                deadline = None if self.bug == "no_deadline" else wait_s + _CALL_S
                response = method(build(failures), timeout=deadline)
            except grpc.RpcError as error:
                if time.monotonic() - since > 30.0:
                    ends(11, "the controller gives no answer", self.bug)
                if self.recover(error) == "register":
                    self.register()
                elif self.bug != "ignores_retry_info":
                    time.sleep(min(2.0, 0.02 * 2**failures) * random.uniform(0.5, 1.0))
                failures += 1
                continue
            self.check(response.header)
            return response

    def check(self, header: pb.ResponseHeader) -> None:
        self.pinned = self.pinned or header.execution_id
        deaf = self.bug == "ignores_headers" or (self.bug == "heartbeats_unheard" and self.beats)
        if header.execution_id != self.pinned and not deaf:
            ends(10, "another controller answers", self.bug)

    def recover(self, error: grpc.RpcError) -> str:
        reason, metadata, delay_s = told(error)
        code = error.code()
        if (self.bug == "final_later" and delay_s is not None) or (self.bug == "final_outage" and not reason):
            ends(11, f"{code.name} {reason}", self.bug)
        if reason == "NOT_REGISTERED":
            return "register"
        self.rewinds = reason == "SEQUENCE_GAP" and self.bug == "ignores_expected"
        if reason == "SEQUENCE_GAP" or self.bug == "retries_everything":
            return "again"
        if reason and delay_s is not None and code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            if self.bug != "ignores_retry_info":
                time.sleep(delay_s)
            return "again"
        if not reason and code in (_LOST[:2] if self.bug == "final_cancelled" else _LOST):
            return "again"
        if reason in ("STALE_EXECUTION", "SUPERSEDED"):
            if self.bug in ("retries_stale", "adopts_executions"):
                self.pinned = "" if self.bug == "adopts_executions" else self.pinned
                return "register"
            ends(10, reason, self.bug)
        if reason == "EXECUTION_ENDED" and metadata.get("end_reason") != "FAILURE":
            ends(0, reason, self.bug)
        ends(11, f"{code}: {error.details()}", self.bug)

    def identity(self) -> pb.WorkerIdentity:
        session = self.older_session or self.session if self.bug == "old_session" else self.session
        return pb.WorkerIdentity(execution_id=self.pinned, session_id=session)

    def register(self) -> None:
        if self.bug == "new_incarnation" and self.session:
            self.incarnation = secrets.token_hex(16)

        def request(_: int) -> pb.RegisterWorkerRequest:
            return pb.RegisterWorkerRequest(
                execution_id=self.pinned,
                role=pb.ROLE_ROLLOUT,
                group=os.environ.get("COSMOS_CTRL_GROUP", "rollout"),
                replica=int(os.environ.get("COSMOS_CTRL_REPLICA", "0")),
                world_size=1,
                incarnation=self.incarnation,
            )

        response = self.call(self.stub.RegisterWorker, request)
        self.older_session, self.session = self.session, response.session_id
        self.limits = response.limits
        self.lease_time_s = response.lease_time.ToNanoseconds() / 1e9
        self.acknowledged(response.applied)
        if self.bug == "drops_unacknowledged" and self.older_session:
            self.unacknowledged.clear()

    # -- leases

    def lease(self) -> None:
        room = self.in_flight - len(self.held)
        if room < 1 or (self.no_more and self.bug != "leases_after_no_more"):
            time.sleep(_GO_ON)
            return
        room += self.bug == "leases_too_much"
        self.requests += 1
        number = self.requests + (self.bug == "skips_a_lease_number" and self.requests == 2)
        wait_s = min(0.2, self.lease_time_s / 6)

        def request(failures: int) -> pb.LeasePromptsRequest:
            resent = number + failures if self.bug == "new_lease_number_on_resend" else number
            message = pb.LeasePromptsRequest(worker=self.identity(), number=resent, max_groups=room)
            message.wait.FromMilliseconds(int(wait_s * 1000))
            return message

        response = self.call(self.stub.LeasePrompts, request, wait_s)
        if response.HasField("weights"):
            self.version = max(self.version, response.weights.version)
        self.no_more = response.no_more
        for group in response.groups:
            self.held[group.lease] = group
            self.work(group)
        if self.no_more and self.bug == "leases_after_no_more":
            self.bug = ""  # once more is enough
            self.no_more = False

    def work(self, group: pb.LeasedGroup) -> None:
        first = group.prompt_key not in self.met
        self.met.add(group.prompt_key)
        source = "plain" if self.bug == "ignores_sources" else group.source
        if source == "hold":
            return
        self.held.pop(group.lease)
        if source in ("fail", "discard"):
            outcome = reports_pb2.OUTCOME_FAILED if source == "fail" else reports_pb2.OUTCOME_DISCARDED
            self.pending.extend(self.rows(group, outcome, "told_to"))
        elif source == "return" and first:
            self.pending.extend(self.rows(group, reports_pb2.OUTCOME_RETURNED))
        else:
            self.pending.extend(self.rows(group, reports_pb2.OUTCOME_COMPLETED))

    def rows(self, group: pb.LeasedGroup, outcome: Any, reason: str = "") -> list[reports_pb2.RolloutRows]:
        masks = list(group.masks)
        if self.bug == "ignores_masks":
            masks = [((1 << group.completions) - 1) >> 64 * word & (1 << 64) - 1 for word in range(len(masks))]
        if self.bug == "first_word_only":
            masks = masks[:1]
        found = []
        # One row for each completion, so that a batch may end after any.
        for index in [64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1]:
            rows = reports_pb2.RolloutRows(outcome=outcome, reason=reason, groups=[group.group], leases=[group.lease])
            rows.words.append(index // 64)
            rows.masks.append(1 << index % 64)
            if outcome == reports_pb2.OUTCOME_COMPLETED:
                version = 0 if self.bug == "wrong_version" else self.version
                rows.lowest_versions.append(version)
                rows.highest_versions.append(version)
                rows.rewards.append(1.0 if self.bug == "wrong_reward" else float(index))
                rows.payload_codec = "bytes"
                mark = b"" if self.bug == "wrong_payload" else f"#{index}".encode()
                rows.payloads.append(group.payload + mark)
            found.append(rows)
        return found * (2 if self.bug == "reports_twice" else 1)

    # -- reports

    def report(self) -> None:
        """Everything that is to be said, until it is acknowledged; else a heartbeat, when one is due."""
        while self.pending or self.unacknowledged:
            if not self.unacknowledged:
                self.form()
            self.send(self.unacknowledged[0])
        if time.monotonic() - self.heard_at > self.lease_time_s / 4 and self.bug != "no_heartbeats":
            self.send(None)

    def form(self, end: str = "") -> None:
        self.batches += 1
        number = self.batches + (self.bug == "skips_a_number" and self.batches == 2)
        batch = reports_pb2.ReportBatch(number=number)
        room = 1 << 30 if self.bug == "batches_too_large" else self.limits.max_batch_completions
        room_bytes = 1 << 30 if self.bug == "ignores_bytes" else self.limits.max_message_bytes - _MESSAGE_BYTES
        while self.pending and room > 0 and (size := self.pending[0].ByteSize() + _ROW_BYTES) <= room_bytes:
            room -= 1
            room_bytes -= size
            batch.rollouts.append(self.pending.popleft())
        if end:
            batch.end.reason = end
        self.unacknowledged.append(batch)
        self.first = self.first or batch

    def send(self, batch: reports_pb2.ReportBatch | None) -> None:
        def request(failures: int) -> pb.SubmitReportsRequest:
            if failures and batch is not None and self.bug == "renumbers_resends":
                self.batches += 1
                batch.number = self.batches
            if failures and batch is not None and self.bug == "changes_resends":
                batch.metrics.add(name="failures", value=failures)
            quiet = self.bug == "confirms_nothing"
            acked = self.applied + (self.bug == "confirms_unacknowledged")
            notices = self.notices + (self.bug == "confirms_unheard_notices")
            content = batch if batch in self.unacknowledged else None  # a new session may have said that it is applied
            if self.rewinds:
                content = self.first
            return pb.SubmitReportsRequest(
                worker=self.identity(),
                acked_through=0 if quiet else acked,
                notices_through=0 if quiet else notices,
                batch=content,
            )

        self.beats = batch is None
        response = self.call(self.stub.SubmitReports, request)
        self.beats = self.rewinds = False
        self.heard_at = time.monotonic()
        trusted = self.bug == "trusts_any_answer" and batch is not None
        self.acknowledged(batch.number if trusted and batch is not None else response.ack.applied)
        for notice in response.ack.notices:
            if notice.number > self.notices:
                self.notices = notice.number
                self.hear(notice)

    def hear(self, notice: reports_pb2.Notice) -> None:
        if notice.WhichOneof("kind") is None and self.bug == "unknown_notice_fatal":
            ends(11, "a notice that is not known", self.bug)
        if self.bug == "unknown_refusal_fatal" and notice.refused.reason not in reports_pb2.RefusalReason.values():
            ends(11, "a refusal that is not known", self.bug)
        for lease in notice.cancelled.leases:
            group = self.held.pop(lease, None)
            if group is not None and self.bug == "reports_cancelled":
                self.pending.extend(self.rows(group, reports_pb2.OUTCOME_RETURNED))

    def acknowledged(self, applied: int) -> None:
        self.applied = max(self.applied, applied)
        while self.unacknowledged and self.unacknowledged[0].number <= self.applied:
            self.unacknowledged.popleft()

    # -- life

    def live(self) -> None:
        self.register()
        while (not self.told or self.bug == "ignores_sigterm") and not (self.no_more and not self.held):
            self.lease()
            self.report()
        if self.bug == "no_end":
            return
        if self.bug != "keeps_what_is_held":
            for group in self.held.values():
                self.pending.extend(self.rows(group, reports_pb2.OUTCOME_RETURNED))
        self.report()
        self.form("done")
        if self.bug == "does_not_wait":
            return
        self.report()


def told(error: Any) -> tuple[str, dict[str, str], float | None]:
    """Reason, metadata and delay of a status of ours; the reason is empty where it is the library's."""
    reason, metadata, delay_s = "", {}, None
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        status = None
    for packed in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if packed.Unpack(info) and info.domain == "cosmos_ctrl.v1":
            reason, metadata = info.reason, dict(info.metadata)
        elif packed.Unpack(retry):
            delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    return reason, metadata, delay_s


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    assert not chosen or chosen in BUGS, chosen
    where = os.environ.get("COSMOS_CTRL_ADDRESS", "")
    if not where:
        ends(11 if chosen == "no_address_is_an_error" else 2, "COSMOS_CTRL_ADDRESS is not set", chosen)
    Worker(where, chosen).live()
    ends(0, "", chosen)
