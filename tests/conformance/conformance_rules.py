"""What every client keeps to, whatever is done to it: watched at the wire, message by message, by a model of its own.

* An answer counts as delivered when it is handed to the library; one that is lost on the way is never counted, and no rule needs it to
  have arrived by a certain time. A rule that is broken is broken by a message, or by the end.
* Time is a lower bound only: a client may be as slow as it likes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format
from google.rpc import error_details_pb2

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2

#: Answers after which a client goes on.
_GOES_ON = frozenset(
    {"RESTORING", "AWAITING_AGREEMENT", "WINDOW_FULL", "WORKER_LIMIT", "NOT_REGISTERED", "SEQUENCE_GAP"}
)

#: The library's own answers after which a client sends again.
_LOST = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})

#: Part of a RetryInfo that is waited for at least: timers of some languages fire a little early.
_OF_DELAY = 0.9

#: Messages under a session that is over that may come one after another once there is a newer one.
_UNDER_WAY = 3

#: Characters of a message in a report.
_SHOWN = 600

_FAMILY = {"register": "register", "lease": "lease", "report": "reports", "heartbeat": "reports"}


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that a client broke."""

    rule: str
    expected: str
    message: str
    """The message that broke it, as JSON and cut; or what was found at the end."""


@dataclass(slots=True)
class Heard:
    """One message of the client."""

    kind: str
    """register, lease, report or heartbeat."""
    message: Any
    batch: bytes
    """The batch as it came, byte for byte."""
    call: int
    """The call that it came in."""

    @property
    def family(self) -> str:
        """register, lease or reports: what is answered and retried together."""
        return _FAMILY[self.kind]

    @property
    def is_end(self) -> bool:
        """Whether it carries the end report."""
        return self.kind == "report" and bool(self.message.batch.HasField("end"))


@dataclass(slots=True)
class _Lease:
    group: pb.LeasedGroup
    open: int
    """Completions that were not reported."""
    oldest_version: int
    outcome: reports_pb2.Outcome.ValueType
    late: bool
    """Answered when the process was leaving, which may not have waited for the answer."""
    cancelled: bool = False


@dataclass(slots=True)
class _Ended:
    """A terminal answer was delivered."""

    why: str
    family: str
    late: set[str] = field(default_factory=set)
    """Other families of which a call began after it: one of each may have been under way."""


class Observer:
    """Watches one client process."""

    def __init__(self, *, execution_id: str, in_flight: int, prompt_of: Callable[[str], bytes]) -> None:
        """
        Args:
            execution_id: the client was launched with; may be empty.
            in_flight: groups it may hold.
            prompt_of: the payload of a prompt, by its key.
        """
        self.broken: list[Broken] = []
        self.is_broken = asyncio.Event()
        self.end_acknowledged = False
        self.told_to_leave = False
        """SIGTERM was sent."""
        self.reports_by: set[str] = set()
        """ "stream" or "unary": which RPC it reports by."""
        self.counts = dict.fromkeys(("register", "lease", "report", "heartbeat", "end"), 0)
        self._pinned, self._in_flight, self._prompt_of = execution_id, in_flight, prompt_of
        self._incarnation = ""
        self._sessions: list[str] = []
        self._old_session_uses: dict[str, int] = {}
        self._limits = pb.Limits()
        self._calls: set[int] = set()
        self._request: tuple[int, int] | None = None
        self._answered_request = 0
        self._no_more = False
        self._leases: dict[int, _Lease] = {}
        self._met: set[str] = set()
        self._version = 0
        self._batches: dict[int, bytes] = {}
        self._end_batch = 0
        self._expected = 1
        self._applied = self._acked = 0
        self._cancelled_by: dict[int, int] = {}
        self.notices_told = self.notices_confirmed = 0
        self._not_before: dict[str, float] = {}
        self._ended: _Ended | None = None

    # -- what the client says

    def heard(self, heard: Heard, *, has_deadline: bool) -> None:
        """A message arrived."""
        self.counts[heard.kind] += 1
        self.counts["end"] += heard.is_end
        new_call = heard.call not in self._calls
        self._calls.add(heard.call)
        self._check_silence(heard, new_call)
        if time.monotonic() < self._not_before.pop(heard.family, 0.0):
            self._broke("retry_info", "nothing before RetryInfo.retry_delay has passed", heard)
        if not has_deadline:
            self._broke("deadline", "a deadline on every unary call", heard)
        if heard.kind == "register":
            self._heard_registration(heard)
            return
        self._check_identity(heard)
        if heard.kind == "lease":
            self._heard_lease(heard)
        else:
            self._heard_report(heard)

    def _check_silence(self, heard: Heard, new_call: bool) -> None:
        ended = self._ended
        if ended is None or not new_call:
            return
        if heard.family in (ended.family, "register") or heard.family in ended.late:
            self._broke("terminal", f"nothing more after {ended.why}", heard)
        ended.late.add(heard.family)

    def _heard_registration(self, heard: Heard) -> None:
        request = heard.message
        if request.execution_id != self._pinned:
            self._broke("pinned_execution", f"execution_id {self._pinned!r}, pinned for the process's life", heard)
        if self._incarnation and request.incarnation != self._incarnation:
            self._broke("incarnation", f"one incarnation for the process's life, {self._incarnation}", heard)
        if len(request.incarnation) < 32:
            self._broke("incarnation", "16 random bytes or more as hex", heard)
        if (request.role, request.rank, request.world_size) != (pb.ROLE_ROLLOUT, 0, 1) or request.group != "rollout":
            self._broke("place", 'ROLE_ROLLOUT, group "rollout", rank 0 of 1', heard)
        self._incarnation = request.incarnation

    def _check_identity(self, heard: Heard) -> None:
        identity = heard.message.worker
        if identity.execution_id != self._pinned:
            self._broke("pinned_execution", f"execution_id {self._pinned!r}, pinned for the process's life", heard)
        if identity.session_id not in self._sessions:
            self._broke("session", f"a session that it was given: {self._sessions}", heard)
            return
        # Some may have been under way when the newest session was given.
        old = identity.session_id != self._sessions[-1]
        self._old_session_uses[heard.family] = self._old_session_uses.get(heard.family, 0) + 1 if old else 0
        if self._old_session_uses[heard.family] > _UNDER_WAY:
            self._broke("session", f"the newest session, {self._sessions[-1]}", heard)

    def _heard_lease(self, heard: Heard) -> None:
        request = heard.message
        asked = (request.number, request.max_groups)
        if self._no_more and request.number > self._answered_request:
            self._broke("no_more", "no request for leases after no_more", heard)
        if request.number not in (self._answered_request, self._answered_request + 1) or request.number < 1:
            self._broke("lease_numbers", f"number {self._answered_request + 1}: 1, 2, 3 … without gaps", heard)
        if self._request is not None and self._request[0] == asked[0] and self._request != asked:
            self._broke(
                "lease_numbers", f"number {asked[0]} with the same content, max_groups {self._request[1]}", heard
            )
        self._request = asked
        held = sum(
            bool(lease.open) and not lease.cancelled and lease.group.source == "hold" for lease in self._leases.values()
        )
        if request.number > self._answered_request and not 1 <= request.max_groups <= self._in_flight - held:
            self._broke("in_flight", f"max_groups from 1 to {self._in_flight - held}", heard)

    def _heard_report(self, heard: Heard) -> None:
        message = heard.message
        self.reports_by.add("stream" if isinstance(message, pb.StreamReportsRequest) else "unary")
        if not self._acked <= message.acked_through <= self._applied:
            self._broke("acked_through", f"from {self._acked} (said before) to {self._applied} (acknowledged)", heard)
        if not self.notices_confirmed <= message.notices_through <= self.notices_told:
            self._broke(
                "notices_through", f"from {self.notices_confirmed} (said before) to {self.notices_told} (told)", heard
            )
        self._acked = max(self._acked, message.acked_through)
        self.notices_confirmed = max(self.notices_confirmed, message.notices_through)
        if heard.kind == "report":
            self._heard_batch(heard)

    def _heard_batch(self, heard: Heard) -> None:
        batch, limits = heard.message.batch, self._limits
        if batch.number < self._expected:
            self._broke("batch_numbers", f"batch {self._expected} or later, as SEQUENCE_GAP said", heard)
        known = self._batches.get(batch.number)
        if known is not None:
            if known != heard.batch:
                self._broke("same_bytes", f"batch {batch.number} as it was sent before, byte for byte", heard)
            return
        if batch.number != len(self._batches) + 1:
            self._broke("batch_numbers", f"batch {len(self._batches) + 1}: 1, 2, 3 … without gaps", heard)
        self._batches[batch.number] = heard.batch
        if self._end_batch:
            self._broke("end", "no batch after the one with the end report", heard)
        if batch.HasField("end"):
            self._end_batch = batch.number
        out = batch.number - self._applied
        if out > limits.max_unacknowledged_batches:
            self._broke("limits", f"at most {limits.max_unacknowledged_batches} batches unacknowledged", heard)
        completions = sum(mask.bit_count() for rows in batch.rollouts for mask in rows.masks)
        if completions > limits.max_batch_completions:
            self._broke("limits", f"at most {limits.max_batch_completions} completions in a batch", heard)
        if heard.message.ByteSize() > limits.max_message_bytes:
            self._broke("limits", f"at most {limits.max_message_bytes} bytes in a message", heard)
        for rows in batch.rollouts:
            self._heard_rows(heard, rows)
        if self._end_batch == batch.number:
            self._check_nothing_is_left(heard)

    def _check_nothing_is_left(self, heard: Heard) -> None:
        left = {
            number: f"{lease.open:#x}"
            for number, lease in self._leases.items()
            if lease.open and not lease.cancelled and not lease.late
        }
        if left:
            self._broke(
                "once", f"every completion of every lease reported, or returned; left are, by lease: {left}", heard
            )

    def _heard_rows(self, heard: Heard, rows: reports_pb2.RolloutRows) -> None:
        rewards, payloads, at = list(rows.rewards), list(rows.payloads), 0
        for row, (number, bits) in enumerate(zip(rows.leases, rows.masks, strict=False)):
            lease = self._leases.get(number)
            word = rows.words[row] if rows.words else 0
            mask = bits << 64 * word
            if lease is None or lease.group.group != rows.groups[row]:
                self._broke(
                    "once", f"a lease that it was given; lease {number} of group {rows.groups[row]} is none", heard
                )
                return
            if mask & ~lease.open:
                self._broke("once", f"completions of lease {number} that were leased and not reported before", heard)
            lease.open &= ~mask
            if (
                lease.group.source == "hold"
                and self._cancelled_by.get(number, self.notices_confirmed + 1) <= self.notices_confirmed
            ):
                self._broke("cancelled", f"nothing about lease {number}, which it was told is cancelled", heard)
            self._check_outcome(heard, rows, lease)
            if rows.outcome == reports_pb2.OUTCOME_COMPLETED:
                count = bits.bit_count()
                self._check_content(
                    heard, rows, row, lease, _indices(mask), rewards[at : at + count], payloads[at : at + count]
                )
                at += count

    def _check_outcome(self, heard: Heard, rows: reports_pb2.RolloutRows, lease: _Lease) -> None:
        source = lease.group.source
        if rows.outcome == reports_pb2.OUTCOME_RETURNED and self.told_to_leave:
            return
        if rows.outcome != lease.outcome or source == "hold":
            wanted = "RETURNED at the end" if source == "hold" else reports_pb2.Outcome.Name(lease.outcome)
            self._broke("outcome", f"{wanted} for a group of source {source!r} (lease {lease.group.lease})", heard)
        elif source in ("fail", "discard") and rows.reason != "told_to":
            self._broke("outcome", f'reason "told_to", not {rows.reason!r}', heard)

    def _check_content(
        self,
        heard: Heard,
        rows: reports_pb2.RolloutRows,
        row: int,
        lease: _Lease,
        indices: list[int],
        rewards: list[float],
        payloads: list[bytes],
    ) -> None:
        prompt = self._prompt_of(lease.group.prompt_key)
        if payloads != [prompt + f"#{index}".encode() for index in indices] or rows.payload_codec != "bytes":
            self._broke(
                "content", f'payloads {prompt[:_SHOWN].decode()}#INDEX of {indices}, payload_codec "bytes"', heard
            )
        if rewards != [float(index) for index in indices]:
            self._broke("content", f"rewards {[float(index) for index in indices]}", heard)
        lowest, highest = rows.lowest_versions[row], rows.highest_versions[row]
        if lowest != highest or not lease.oldest_version <= lowest <= self._version:
            self._broke("content", f"one version, from {lease.oldest_version} to {self._version}", heard)

    # -- what it is told

    def answered(self, heard: Heard, response: Any, *, foreign: bool) -> None:
        """An answer is delivered; `foreign`: under another execution's header."""
        if foreign:
            self._end(heard, "a header with another execution ID")
        elif heard.kind == "register":
            self._pinned = self._pinned or response.header.execution_id
            self._sessions.append(response.session_id)
            self._limits.CopyFrom(response.limits)
            self._applied = max(self._applied, response.applied)
        elif heard.kind == "lease":
            self._answered_lease(heard, response)
        else:
            self._applied = max(self._applied, response.ack.applied)
            self.end_acknowledged |= 0 < self._end_batch <= self._applied
            self._notices(response.ack.notices)

    def _answered_lease(self, heard: Heard, response: pb.LeasePromptsResponse) -> None:
        self._answered_request = max(self._answered_request, heard.message.number)
        self._no_more |= response.no_more
        if response.HasField("weights"):
            self._version = max(self._version, response.weights.version)
        for group in response.groups:
            if group.lease not in self._leases:
                mask = sum(bits << 64 * word for word, bits in enumerate(group.masks))
                self._leases[group.lease] = _Lease(
                    group, mask, self._version, self._outcome(group), late=self.told_to_leave
                )
                self._met.add(group.prompt_key)

    def _outcome(self, group: pb.LeasedGroup) -> reports_pb2.Outcome.ValueType:
        if group.source == "return" and group.prompt_key not in self._met:
            return reports_pb2.OUTCOME_RETURNED
        named = {"fail": reports_pb2.OUTCOME_FAILED, "discard": reports_pb2.OUTCOME_DISCARDED}
        return named.get(group.source, reports_pb2.OUTCOME_COMPLETED)

    def _notices(self, notices: Iterable[reports_pb2.Notice]) -> None:
        for notice in notices:
            self.notices_told = max(self.notices_told, notice.number)
            for number in notice.cancelled.leases:
                self._cancelled_by.setdefault(number, notice.number)
                if number in self._leases:
                    self._leases[number].cancelled = True

    def refused(self, heard: Heard, code: str, info: error_details_pb2.ErrorInfo, retry_s: float | None) -> None:
        """A status is delivered; `info` is empty where it has no ErrorInfo of ours."""
        reason = info.reason
        if reason == "SEQUENCE_GAP" and heard.family == "reports":
            self._expected = int(info.metadata["expected"])
        if retry_s is not None:
            self._not_before[heard.family] = time.monotonic() + _OF_DELAY * retry_s
        elif reason not in _GOES_ON if reason else code not in _LOST:
            self._end(heard, reason or f"{code} without our ErrorInfo")

    def _end(self, heard: Heard, why: str) -> None:
        if self._ended is None:
            self._ended = _Ended(why, heard.family)

    # -- the end

    def at_exit(self, *, end_expected: bool) -> None:
        """The process has ended as it should: what has to be true then."""
        if end_expected and not self.end_acknowledged:
            self.add("end", "an end report that is acknowledged before the process ends", "there was none")

    def add(self, rule: str, expected: str, found: str) -> None:
        """A rule is broken by what was found, not by a message."""
        self.broken.append(Broken(rule, expected, found))
        self.is_broken.set()

    def _broke(self, rule: str, expected: str, heard: Heard) -> None:
        text = json_format.MessageToJson(heard.message, indent=None, preserving_proto_field_name=True)
        self.add(rule, expected, f"{type(heard.message).__name__} {text}"[:_SHOWN])


def _indices(mask: int) -> list[int]:
    return [index for index in range(mask.bit_length()) if mask >> index & 1]
