"""Prompt groups on their way from the draw to settlement.

* Every unsettled completion of a group is in exactly one of four masks: pending (waits for a worker), leased, ready
  (accepted), training (in a command). A completion leaves the table by settling, and only then.
* A group is leased as a whole, to one worker, under a number that was never used before. A row under another number, or
  from another worker, is refused by itself and changes nothing: late results never mix into the group's new life.
* What waits is leased oldest group first, so a hole under a settled window is the next thing leased.
* Payloads belong to the controller from acceptance, to the trainer from dispatch. When completions are discarded or
  generated again, the producer of a handle is told to free it.
* Only explicit failure reports count toward the poison limit: never an expiry, a lost session or a restart.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, repeat
from typing import Literal

from cosmos_ctrl.core.errors import UnknownWorkError
from cosmos_ctrl.core.execution import Incarnation
from cosmos_ctrl.core.groups import (
    CompletionPayload,
    Disposition,
    Group,
    Lease,
    LeasesCancelled,
    PayloadsFreed,
    Refusal,
    RolloutRows,
    Segment,
)
from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.sampling import Draw

#: Tells the controller that completions settled: rows of (group, mask), "trained" or "discarded", reason.
Settle = Callable[[Sequence[tuple[int, int]], Literal["trained", "discarded"], str], None]


#: Weight of the newest row in the mean size of a payload.
_PAYLOAD_WEIGHT = 1 / 8


class Rollouts:
    """All unsettled groups, and the queues they wait in."""

    def __init__(self, policy: RunPolicy, settle: Settle, clock: Callable[[], float]) -> None:
        self._policy, self._settle, self._clock = policy, settle, clock
        self._minimum = policy.min_completions_per_group
        self._groups: dict[int, Group] = {}
        self._pending: list[int] = []
        self._leased: dict[int, int] = {}  # completions of each
        self._leased_completions = 0
        self._ready: dict[int, None] = {}
        self._last_lease = 0
        self.buffered_bytes = 0
        self._payload_bytes = 0.0  # of one completion, as they have been of late
        self.lease_lost = 0

    # -- counts

    def group(self, group: int) -> Group | None:
        """An unsettled group."""
        return self._groups.get(group)

    def holder_of(self, group: int | None) -> str:
        """The worker that a group is out with; empty when there is none."""
        found = self._groups.get(group) if group is not None else None
        return str(found.holder.place) if found is not None and found.holder is not None else ""

    @property
    def pending_groups(self) -> int:
        """Groups that wait for a worker."""
        return len(self._pending)

    @property
    def leased_groups(self) -> int:
        """Groups out with workers."""
        return len(self._leased)

    @property
    def ready_groups(self) -> int:
        """Groups complete and waiting for a command."""
        return len(self._ready)

    @property
    def outstanding_groups(self) -> int:
        """Groups that are not settled and not in a command."""
        return len(self._pending) + len(self._leased) + len(self._ready)

    @property
    def unsettled_groups(self) -> int:
        """Groups with anything unsettled, in a command or not."""
        return len(self._groups)

    @property
    def last_lease(self) -> int:
        """Newest lease number given."""
        return self._last_lease

    @property
    def is_full(self) -> bool:
        """Whether the payloads that are held, and those to be expected of what is out with workers, pass the limit; never while everything
        waits to be leased, for then nothing would make room."""
        expected = self.buffered_bytes + self._leased_completions * self._payload_bytes
        return expected > self._policy.max_buffered_bytes and len(self._groups) > len(self._pending)

    # -- drawing and leasing

    def add(self, tokens: Iterable[int], draw: Draw, settled: Sequence[int] = ()) -> None:
        """The groups of a new draw wait for a worker, without what was settled of them before this execution."""
        before = settled or (0,) * len(draw.sizes)
        for token, prompt, size, done in zip(tokens, draw.prompts, draw.sizes, before, strict=True):
            pending = (1 << size) - 1 & ~done
            if pending:
                # What was settled before counts as trained, so that its rest is not dropped for being too little.
                self._groups[token] = Group(token, prompt, size, pending, trained=done.bit_count())
                heapq.heappush(self._pending, token)

    def lease(self, worker: Incarnation, most: int, most_bytes: int) -> list[Lease]:
        """Hand up to `most` waiting groups, oldest first, to `worker`, until they pass `most_bytes` of prompts or the buffers are full."""
        leases: list[Lease] = []
        while self._pending and len(leases) < most and most_bytes > 0 and not self.is_full:
            group = self._groups[heapq.heappop(self._pending)]
            most_bytes -= group.prompt.size_bytes
            self._last_lease += 1
            limit = self._policy.lease_deadline_s
            group.lease, group.holder = self._last_lease, worker
            group.leased, group.pending = group.pending, 0
            group.deadline = None if limit is None else self._clock() + limit
            self._leased[group.id] = completions = group.leased.bit_count()
            self._leased_completions += completions
            worker.leases.add(group.id)
            leases.append(Lease(group.id, group.lease, group.prompt, group.size, group.leased, limit))
        return leases

    def expire(self, worker: Incarnation) -> None:
        """Every lease of `worker` is lost; its groups wait for another worker. It is told, in case it comes back."""
        groups = [self._groups[token] for token in sorted(worker.leases)]
        if groups:
            worker.log.notify(LeasesCancelled(tuple(group.lease for group in groups)))
        for group in groups:
            self._end_lease(group)

    def cancel_all(self) -> None:
        """Every lease is lost and its holder told that it is not wanted any more."""
        for group in [self._groups[token] for token in self._leased]:
            if group.holder is not None:
                group.holder.log.notify(LeasesCancelled((group.lease,)))
            self._end_lease(group)

    def expire_overdue(self) -> bool:
        """Leases past their deadline are lost, and their holders told; whether there were any."""
        if self._policy.lease_deadline_s is None:
            return False
        now, found = self._clock(), False
        for group in [self._groups[token] for token in self._leased]:
            if group.deadline is not None and group.deadline < now and group.holder is not None:
                group.holder.log.notify(LeasesCancelled((group.lease,)))
                self._end_lease(group)
                found = True
        return found

    def can_give_up(self, token: int, *, told: int) -> bool:
        """Whether a group may be discarded to make room: what is with a worker who was told of it, by lease numbers up to `told`,
        unfinished. What is ready, or in a command, soon makes room by itself; what waits is the next thing leased."""
        return token in self._leased and self._groups[token].lease <= told

    def give_up(self, token: int, reason: str) -> None:
        """Discard all that is left of a group that is out with a worker, who is told."""
        group = self._groups[token]
        if group.holder is not None:
            group.holder.log.notify(LeasesCancelled((group.lease,)))
        self._take_back(group)
        left, group.pending, group.leased = group.unsettled, 0, 0
        self._drop(group, left, reason)

    # -- reports

    def check_rows(self, rows: Iterable[tuple[int, int, int, int]], next_token: int, first_token: int) -> None:
        """Raises UnknownWorkError for a row of (group, lease, word, bits) whose group, lease or completions were never given."""
        groups, last_lease = self._groups, self._last_lease
        for token, lease, word, bits in rows:
            if not first_token <= token < next_token:
                raise UnknownWorkError(what=f"group {token}")
            if not 0 < lease <= last_lease:
                raise UnknownWorkError(what=f"lease {lease}")
            group = groups.get(token)
            if group is not None and 64 * word + bits.bit_length() > group.size:
                raise UnknownWorkError(
                    what=f"completions {bits:#x} of word {word} of group {token}, which has {group.size}"
                )

    def holds(self, worker: Incarnation, token: int, lease: int) -> bool:
        """Whether the group is out with `worker` under that lease."""
        group = self._groups.get(token)
        return group is not None and group.holder is worker and group.lease == lease

    def apply(self, worker: Incarnation, rows: RolloutRows) -> list[tuple[int, Refusal, int]]:
        """Apply rows that `check_rows` passed; returns what of them is refused by itself and changes nothing: row, why, and which bits."""
        refused: list[tuple[int, Refusal, int]] = []
        groups, completed, ended, zeros = self._groups, rows.outcome == "completed", worker.replica_ended, repeat(0)
        rewards, payloads, handles, end = rows.rewards, rows.payloads, rows.handles, 0
        columns = zip(  # noqa: B905  # zeros have no end
            rows.groups,
            rows.leases,
            rows.words or zeros,
            rows.masks,
            rows.lowest_versions or zeros,
            rows.highest_versions or zeros,
        )
        for row, (token, lease, word, bits, lowest, highest) in enumerate(columns):
            start, end = end, end + bits.bit_count()
            group = groups.get(token)
            if group is None or group.lease != lease or group.holder is not worker or ended:
                refused.append((row, self._why_refused(group, worker), bits))
                continue
            # Only now: the word of a retired group was not checked, and may be anything.
            mask = bits << 64 * word if word else bits
            accepted = mask & group.leased
            if accepted:
                group.leased ^= accepted
                if completed:
                    group.ready |= accepted
                    segment = Segment(mask, accepted, rewards[start:end], lowest, highest, worker)
                    group.segments.append(segment)
                    if payloads:
                        segment.codec, segment.payloads = rows.codec, payloads[start:end]
                        self._hold_payloads(segment.payloads)
                    elif handles:
                        segment.codec, segment.handles = rows.codec, handles[start:end]
                else:
                    self._give_up_part(group, accepted, rows)
                if not group.leased:
                    self._settle_lease(group)
            if accepted != mask:
                refused.append((row, "ALREADY_REPORTED", (mask ^ accepted) >> 64 * word))
        return refused

    # -- training

    def drop_stale(self, completed_steps: int) -> bool:
        """Discard or regenerate ready groups that are too old for the step after `completed_steps`; whether there were any."""
        limit, before = self._policy.max_staleness, len(self._ready)
        if limit is None:
            return False
        for token in list(self._ready):
            group = self._groups[token]
            lowest = min(segment.lowest_version for segment in group.segments if segment.held & group.ready)
            if completed_steps - lowest > limit:
                del self._ready[token]
                if self._policy.on_stale == "discard":
                    self._drop(group, group.ready, "stale")
                else:
                    self._regenerate(group, group.ready)
        return len(self._ready) < before

    def take(self, most: int) -> list[tuple[int, int]]:
        """Move up to `most` ready groups, first ready first, into a command; returns rows of (group, mask)."""
        rows = []
        for token in list(islice(self._ready, most)):
            group = self._groups[token]
            del self._ready[token]
            group.training, group.ready = group.ready, 0
            rows.append((token, group.training))
        return rows

    def drop_tail(self, reason: str) -> None:
        """Discard everything that is ready: the run ends and it is too little for a command."""
        for token in list(self._ready):
            group = self._groups[token]
            del self._ready[token]
            self._drop(group, group.ready, reason)

    def payloads(self, token: int, mask: int) -> list[CompletionPayload]:
        """The completions of a command's row, by index."""
        found = []
        for segment in self._groups[token].segments:
            bits = segment.held & mask
            while bits:
                completion = (bits & -bits).bit_length() - 1
                bits &= bits - 1
                at = segment.position(completion)
                found.append(
                    CompletionPayload(
                        completion,
                        segment.rewards[at],
                        segment.lowest_version,
                        segment.highest_version,
                        segment.codec,
                        segment.payloads[at] if segment.payloads else None,
                        segment.handles[at] if segment.handles else None,
                    )
                )
        return sorted(found, key=lambda payload: payload.completion)

    def train(self, rows: Sequence[tuple[int, int]]) -> float:
        """A committed command trained these completions, rows of (group, mask): they settle. Returns the sum of their rewards."""
        groups, reward = self._groups, 0.0
        for token, mask in rows:
            group = groups[token]
            group.training ^= mask
            group.trained += mask.bit_count()
            for segment in group.segments:
                whole = segment.held & mask == segment.reported
                reward += sum(segment.rewards) if whole else segment.reward_sum(mask)
            self._let_go(group, mask)
        if rows:
            self._settle(rows, "trained", "")
        return reward

    def dispose(self, rows: Iterable[tuple[int, int]], disposition: Disposition, reason: str) -> None:
        """A committed command did something else with these completions."""
        for token, mask in rows:
            group = self._groups[token]
            group.training ^= mask
            if disposition == "discarded":
                self._free(group, mask)
                self._settle_part(group, mask, "discarded", reason)
            elif disposition == "returned":
                group.ready |= mask
                if not group.pending:  # else its other completions are generated first: a group trains whole
                    self._ready[token] = None
            else:
                self._ready.pop(token, None)
                self._regenerate(group, mask)

    # -- inner moves

    def _why_refused(self, group: Group | None, worker: Incarnation) -> Refusal:
        if group is None:
            return "RETIRED"
        if worker.replica_ended:
            return "ENDED"
        self.lease_lost += 1
        return "LEASE_LOST"

    def _hold_payloads(self, payloads: Sequence[bytes]) -> None:
        size = sum(map(len, payloads))
        self.buffered_bytes += size
        each, before = size / len(payloads), self._payload_bytes
        self._payload_bytes = before + (each - before) * _PAYLOAD_WEIGHT if before else each

    def _give_up_part(self, group: Group, accepted: int, rows: RolloutRows) -> None:
        """A worker will not complete these: it gives them up for good, could not generate them, or hands them back."""
        if rows.outcome == "discarded":
            self._settle_part(group, accepted, "discarded", rows.reason)
            return
        if rows.outcome == "failed":
            if group.failed_lease != group.lease:  # one lease is one failure, in however many rows it is reported
                group.failed_lease = group.lease
                group.failures += 1
            if group.failures >= self._policy.poison_limit:
                self._settle_part(group, accepted, "discarded", f"poison:{rows.reason}")
                return
        group.pending |= accepted

    def _end_lease(self, group: Group) -> None:
        group.pending |= group.leased
        group.leased = 0
        self._settle_lease(group)

    def _settle_lease(self, group: Group) -> None:
        """After any change of `leased`: when nothing is out any more, the lease ends and the group moves on."""
        if group.leased or group.holder is None:
            return
        self._take_back(group)
        if group.pending:
            heapq.heappush(self._pending, group.id)
        elif group.ready:
            if group.ready.bit_count() + group.trained < self._minimum:
                self._drop(group, group.ready, "below_minimum")
            else:
                self._ready[group.id] = None

    def _take_back(self, group: Group) -> None:
        if group.holder is not None:
            group.holder.leases.discard(group.id)
            group.holder = group.deadline = None
            self._leased_completions -= self._leased.pop(group.id)

    def _drop(self, group: Group, mask: int, reason: str) -> None:
        group.ready &= ~mask
        self._free(group, mask)
        self._settle_part(group, mask, "discarded", reason)

    def _regenerate(self, group: Group, mask: int) -> None:
        group.ready &= ~mask
        self._free(group, mask)
        self._release(group, mask)
        if not group.pending:
            heapq.heappush(self._pending, group.id)
        group.pending |= mask

    def _free(self, group: Group, mask: int) -> None:
        for segment in group.segments:
            freed = segment.held & mask
            if freed and segment.handles:
                segment.producer.log.notify(PayloadsFreed(((group.id, freed),)))

    def _settle_part(self, group: Group, mask: int, outcome: Literal["trained", "discarded"], reason: str) -> None:
        if not mask:
            return
        self._settle(((group.id, mask),), outcome, reason)
        self._let_go(group, mask)

    def _let_go(self, group: Group, mask: int) -> None:
        """After completions settled: let go of what was reported for them, and of the group with its last ones."""
        if group.pending | group.leased | group.ready | group.training:
            self._release(group, mask)
        else:
            del self._groups[group.id]
            for segment in group.segments:
                if segment.payloads:
                    self.buffered_bytes -= sum(map(len, segment.payloads))

    def _release(self, group: Group, mask: int) -> None:
        """Let go of what was reported for completions of `mask`."""
        kept = []
        for segment in group.segments:
            segment.held &= ~mask
            if segment.held:
                kept.append(segment)
            elif segment.payloads:
                self.buffered_bytes -= sum(map(len, segment.payloads))
        group.segments = kept
