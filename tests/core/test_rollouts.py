"""Groups on their way: four masks, lease numbers, poison, staleness, and who owns a payload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from core_harness import Clock, make_policy
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cosmos_ctrl.core.errors import MalformedError, UnknownWorkError
from cosmos_ctrl.core.execution import BatchLog, Incarnation, Place, WorkerInfo
from cosmos_ctrl.core.groups import Group, Lease, LeasesCancelled, PayloadsFreed, RolloutRows
from cosmos_ctrl.core.ledger import SamplingBoundary
from cosmos_ctrl.core.rollouts import Rollouts
from cosmos_ctrl.core.sampling import Draw, Prompt


def worker(replica: int = 0) -> Incarnation:
    return Incarnation(
        WorkerInfo(place=Place("rollout", "r", replica, 0), incarnation=f"{replica:032x}"),
        BatchLog(max_unacknowledged=8),
    )


def draw(*sizes: int) -> Draw:
    after = SamplingBoundary(epoch=1, sampler_state=None, remaining_completions=0)
    return Draw(tuple(Prompt(key=f"p{i}") for i in range(len(sizes))), sizes, after)


def report(
    rollouts: Rollouts,
    holder: Incarnation,
    token: int,
    mask: int,
    outcome: Any = "completed",
    *,
    lease: int | None = None,
    reason: str = "",
    version: int = 0,
    handles: bool = False,
    rewards: list[float] | None = None,
) -> tuple[int, str | None]:
    """Report completions of one group; returns what was accepted, and why the rest was not."""
    group = rollouts.group(token)
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    words = sorted({bit // 64 for bit in bits})
    masks = [mask >> 64 * word & (1 << 64) - 1 for word in words]
    completed = outcome == "completed"
    refused = rollouts.apply(
        holder,
        RolloutRows(
            outcome=outcome,
            reason=reason,
            groups=[token] * len(words),
            leases=[group.lease if lease is None and group else lease or 0] * len(words),
            words=words if any(words) else (),
            masks=masks,
            lowest_versions=[version] * len(words) if completed else (),
            highest_versions=[version] * len(words) if completed else (),
            rewards=(rewards or [float(bit) for bit in bits]) if completed else (),
            codec="text",
            payloads=[f"payload-{bit}".encode() for bit in bits] if completed and not handles else (),
            handles=[f"handle-{bit}" for bit in bits] if completed and handles else (),
        ),
    )
    left = sum(bits << 64 * words[row] for row, _, bits in refused)
    return mask ^ left, refused[0][1] if refused else None


def dispose(rollouts: Rollouts, token: int, mask: int, disposition: Any, reason: str = "") -> float:
    """What a step did with completions of one group; returns the rewards of what it trained."""
    if disposition == "trained":
        return rollouts.train([(token, mask)])
    rollouts.dispose([(token, mask)], disposition, reason)
    return 0.0


class Table:
    """Rollouts, and what settled of them."""

    def __init__(self, *sizes: int, **policy: Any) -> None:
        self.clock = Clock()
        self.settled: list[tuple[int, int, str, str]] = []
        self.rollouts = Rollouts(make_policy(**policy), self.on_settle, self.clock)
        self.rollouts.add(range(1, len(sizes) + 1), draw(*sizes))

    def on_settle(self, rows: Sequence[tuple[int, int]], outcome: str, reason: str) -> None:
        self.settled += [(token, mask, outcome, reason) for token, mask in rows]

    def group(self, token: int) -> Group:
        group = self.rollouts.group(token)
        assert group is not None
        return group

    def lease(self, holder: Incarnation, most: int = 1) -> list[Lease]:
        return self.rollouts.lease(holder, most, 1 << 20)

    def finish(self, lease: Lease, holder: Incarnation, **how: Any) -> None:
        accepted = self.report(lease.group, lease.mask, holder, lease=lease.number, **how)
        assert accepted == (lease.mask, None)

    def report(self, token: int, mask: int, holder: Incarnation, *outcome: Any, **how: Any) -> tuple[int, str | None]:
        return report(self.rollouts, holder, token, mask, *outcome, **how)

    def dispose(self, token: int, mask: int, disposition: Any, reason: str = "") -> float:
        return dispose(self.rollouts, token, mask, disposition, reason)


# -- the property


class RolloutsMachine(RuleBasedStateMachine):
    """Any order of events, against a dict that says of each completion where it should be."""

    @initialize(minimum=st.integers(1, 3), poison=st.integers(1, 3), stale=st.sampled_from(["discard", "regenerate"]))
    def begin(self, minimum: int, poison: int, stale: Any) -> None:
        self.clock = Clock()
        self.policy = make_policy(
            min_completions_per_group=minimum,
            poison_limit=poison,
            max_staleness=1,
            on_stale=stale,
            lease_deadline_s=5.0,
        )
        self.rollouts = Rollouts(self.policy, self.on_settle, self.clock)
        self.where: dict[tuple[int, int], str] = {}
        self.workers = [worker(i) for i in range(3)]
        self.leases: list[tuple[Lease, Incarnation]] = []
        self.numbers: set[int] = set()
        self.next_token = 1
        self.steps = 0
        self.rows: list[tuple[int, int]] = []
        self.failures: Counter[int] = Counter()
        self.failed_leases: set[int] = set()
        self.owner: dict[tuple[int, int], str] = {}
        """Who made the handle that is held for a completion."""
        self.accepted: Counter[tuple[str, int, int]] = Counter()
        self.trained: Counter[tuple[str, int, int]] = Counter()

    def on_settle(self, rows: Sequence[tuple[int, int]], outcome: str, reason: str) -> None:
        for token, mask in rows:
            self.on_settled(token, mask, outcome, reason)

    def on_settled(self, token: int, mask: int, outcome: str, reason: str) -> None:
        assert mask
        assert (outcome == "discarded") == bool(reason)
        for bit in self.bits(mask):
            assert self.where[token, bit] != "settled"
            if reason.startswith("poison"):
                assert self.failures[token] >= self.policy.poison_limit
            self.where[token, bit] = "settled"

    @staticmethod
    def bits(mask: int) -> list[int]:
        return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]

    @rule(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def draw(self, sizes: list[int]) -> None:
        if len(self.where) > 60:
            return
        tokens = range(self.next_token, self.next_token + len(sizes))
        self.next_token = tokens[-1] + 1
        self.rollouts.add(tokens, draw(*sizes))
        self.where.update(
            {(token, bit): "pending" for token, size in zip(tokens, sizes, strict=True) for bit in range(size)}
        )

    @rule(who=st.integers(0, 2), most=st.integers(1, 4))
    def lease(self, who: int, most: int) -> None:
        waiting = sorted(
            {token for (token, _), place in self.where.items() if place == "pending" and not self.is_out(token)}
        )
        leases = self.rollouts.lease(self.workers[who], most, 1 << 20)
        assert [lease.group for lease in leases] == waiting[:most], "not the oldest holes first"
        for lease in leases:
            assert lease.number not in self.numbers, "a lease number was used twice"
            self.numbers.add(lease.number)
            self.leases.append((lease, self.workers[who]))
            for bit in self.bits(lease.mask):
                assert self.where[lease.group, bit] == "pending"
                self.where[lease.group, bit] = "leased"

    def is_out(self, token: int) -> bool:
        return any(place == "leased" for (group, _), place in self.where.items() if group == token)

    @rule(
        data=st.data(),
        what=st.sampled_from(["complete", "complete", "complete", "discard", "fail", "give_back"]),
        handles=st.booleans(),
        late=st.booleans(),
    )
    def report(self, data: st.DataObject, what: str, handles: bool, late: bool) -> None:
        if not self.leases:
            return
        lease, holder = self.leases[data.draw(st.integers(0, len(self.leases) - 1))] if late else self.leases[-1]
        mask = data.draw(st.integers(1, (1 << lease.size) - 1))
        group = self.rollouts.group(lease.group)
        before = (
            None if group is None else (group.pending, group.leased, group.ready, group.training, len(group.segments))
        )
        outcome = {"complete": "completed", "discard": "discarded", "fail": "failed", "give_back": "returned"}[what]
        reason = "no good" if what in ("discard", "fail") else ""
        if group is None or group.lease != lease.number or not group.leased or group.holder is not holder:
            accepted, why = report(
                self.rollouts, holder, lease.group, mask, outcome, lease=lease.number, reason=reason, handles=handles
            )
            assert (accepted, why) == (0, "RETIRED" if group is None else "LEASE_LOST")
            after = self.rollouts.group(lease.group)
            assert before == (
                None
                if after is None
                else (after.pending, after.leased, after.ready, after.training, len(after.segments))
            )
            return
        leased = sum(
            1 << bit for (token, bit), place in self.where.items() if token == lease.group and place == "leased"
        )
        if what == "fail" and mask & leased and lease.number not in self.failed_leases:
            self.failed_leases.add(lease.number)
            self.failures[lease.group] += 1
        self.expect(what, lease.group, mask & leased, str(holder.place) if handles else "")
        version = self.steps if what == "complete" else 0
        accepted, _ = report(
            self.rollouts,
            holder,
            lease.group,
            mask,
            outcome,
            lease=lease.number,
            reason=reason,
            version=version,
            handles=handles,
        )
        assert accepted == mask & leased
        if not accepted:
            assert before == (group.pending, group.leased, group.ready, group.training, len(group.segments))

    def expect(self, what: str, token: int, mask: int, owner: str) -> None:
        """Where a report should move completions to; what settles says so itself."""
        poisoned = what == "fail" and self.failures[token] >= self.policy.poison_limit
        for bit in self.bits(mask):
            if what == "complete":
                self.where[token, bit] = "ready"
                self.owner.pop((token, bit), None)
                if owner:
                    self.owner[token, bit] = owner
                    self.accepted[owner, token, bit] += 1
            elif what != "discard" and not poisoned:
                self.where[token, bit] = "pending"

    @rule(who=st.integers(0, 2))
    def lose(self, who: int) -> None:
        for token in self.workers[who].leases:
            self.lost(token)
        self.rollouts.expire(self.workers[who])
        assert not self.workers[who].leases

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        overdue = [lease for lease, holder in self.leases if lease.group in holder.leases]
        before = {lease.group: self.rollouts.group(lease.group) for lease in overdue}
        due = [
            token
            for token, group in before.items()
            if group and group.deadline is not None and group.deadline < self.clock.now
        ]
        for token in due:
            self.lost(token)
        assert self.rollouts.expire_overdue() is bool(due)

    def lost(self, token: int) -> None:
        for (group, bit), place in self.where.items():
            if group == token and place == "leased":
                self.where[group, bit] = "pending"

    @rule(most=st.integers(1, 3))
    def take(self, most: int) -> None:
        if self.rows:
            return
        self.rows = self.rollouts.take(most)
        for token, mask in self.rows:
            for bit in self.bits(mask):
                assert self.where[token, bit] == "ready"
                self.where[token, bit] = "training"

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if not self.rows:
            return
        self.steps += 1
        parts: list[tuple[int, int, Any]] = []
        for token, mask in self.rows:
            for bit in self.bits(mask):
                parts.append(
                    (
                        token,
                        1 << bit,
                        data.draw(st.sampled_from(["trained", "trained", "discarded", "returned", "payload_lost"])),
                    )
                )
        for token, mask, disposition in data.draw(st.permutations(parts)):
            bit = mask.bit_length() - 1
            self.where[token, bit] = {"returned": "ready", "payload_lost": "pending"}.get(disposition, "training")
            dispose(self.rollouts, token, mask, disposition, "rejected" if disposition == "discarded" else "")
            if disposition == "trained" and (token, bit) in self.owner:
                self.trained[self.owner[token, bit], token, bit] += 1
        self.rows = []

    @rule()
    def drop_stale(self) -> None:
        before = dict(self.where)
        ready = self.rollouts.ready_groups
        assert self.rollouts.drop_stale(self.steps) is (self.rollouts.ready_groups < ready)
        if self.policy.on_stale == "regenerate":
            for token, group in list(self.groups().items()):
                for bit in self.bits(group.pending):
                    if before[token, bit] == "ready":
                        self.where[token, bit] = "pending"

    @rule()
    def drop_tail(self) -> None:
        self.rollouts.drop_tail("tail")
        assert self.rollouts.ready_groups == 0

    def groups(self) -> dict[int, Group]:
        return {token: group for token in range(1, self.next_token) if (group := self.rollouts.group(token))}

    @invariant()
    def every_unsettled_completion_is_in_exactly_one_mask(self) -> None:
        if not hasattr(self, "rollouts"):
            return
        groups = self.groups()
        for (token, bit), place in self.where.items():
            group = groups.get(token)
            found = (
                []
                if group is None
                else [n for n in ("pending", "leased", "ready", "training") if getattr(group, n) >> bit & 1]
            )
            assert found == ([] if place == "settled" else [place]), (token, bit)

    @invariant()
    def every_group_waits_in_exactly_one_queue(self) -> None:
        if not hasattr(self, "rollouts"):
            return
        groups = self.groups().values()
        training = sum(1 for group in groups if group.training)
        assert self.rollouts.unsettled_groups == len(groups)
        assert self.rollouts.outstanding_groups == len(groups) - training
        assert self.rollouts.leased_groups == sum(1 for group in groups if group.leased)
        # As they were given; what is reported of a group is not told apart.
        given = {lease.group: lease.mask.bit_count() for lease, _ in self.leases}
        out = sum(given[group.id] for group in groups if group.leased)
        assert self.rollouts._leased_completions == out
        assert self.rollouts.ready_groups == sum(1 for g in groups if g.ready and not g.pending and not g.leased)
        for member in self.workers:
            assert member.leases == {group.id for group in groups if group.holder is member}

    @invariant()
    def bytes_are_those_of_what_is_held(self) -> None:
        if not hasattr(self, "rollouts"):
            return
        segments = [segment for group in self.groups().values() for segment in group.segments]
        assert self.rollouts.buffered_bytes == sum(len(payload) for segment in segments for payload in segment.payloads)
        for group in self.groups().values():
            held = 0
            for part in group.segments:
                assert part.held
                assert part.held & ~part.reported == 0
                assert held & part.held == 0
                held |= part.held
            assert held == group.ready | group.training

    @invariant()
    def a_handle_is_held_or_freed_once_or_the_trainers(self) -> None:
        if not hasattr(self, "rollouts"):
            return
        freed: Counter[tuple[str, int, int]] = Counter()
        for member in self.workers:
            for notice in member.log.notices:
                if isinstance(notice.content, PayloadsFreed):
                    freed.update(
                        (str(member.place), token, bit)
                        for token, mask in notice.content.rows
                        for bit in self.bits(mask)
                    )
        held: Counter[tuple[str, int, int]] = Counter()
        for group in self.groups().values():
            for part in group.segments:
                if part.handles:
                    held.update((str(part.producer.place), group.id, bit) for bit in self.bits(part.held))
        assert self.accepted == held + freed + self.trained, "neither held, nor given back, nor the trainer's"


TestRollouts = RolloutsMachine.TestCase
TestRollouts.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


# -- leases


def test_g1_a_hole_under_a_settled_window_is_the_next_thing_leased() -> None:
    table = Table(1, 1, 1, 1)
    first, second = worker(0), worker(1)
    hole = table.lease(first)[0]
    for lease in table.lease(second, 2):
        table.finish(lease, second)
    table.rollouts.expire(first)
    assert [lease.group for lease in table.lease(second, 2)] == [hole.group, 4]


def test_g6_a_late_result_never_mixes_into_the_groups_new_life() -> None:
    table = Table(2)
    first, second = worker(0), worker(1)
    old = table.lease(first)[0]
    table.rollouts.expire(first)
    new = table.lease(second)[0]
    assert new.number != old.number
    assert table.report(1, 0b11, first, lease=old.number) == (0, "LEASE_LOST")
    assert table.report(1, 0b11, second, lease=old.number) == (0, "LEASE_LOST")
    assert table.report(1, 0b11, first, lease=new.number) == (0, "LEASE_LOST")
    assert table.rollouts.lease_lost == 3
    table.finish(new, second)
    assert table.report(1, 0b11, second, lease=new.number) == (0, "LEASE_LOST")


def test_a_settled_group_is_retired_and_an_ended_worker_is_ended() -> None:
    table = Table(1, 1)
    first = worker()
    lease, other = table.lease(first, 2)
    table.report(lease.group, lease.mask, first, "discarded", reason="no good")
    assert table.report(lease.group, lease.mask, first, lease=lease.number) == (0, "RETIRED")
    first.replica_ended = True
    assert table.report(other.group, other.mask, first, lease=other.number) == (0, "ENDED")


@pytest.mark.parametrize(
    ("token", "lease", "word", "bits"),
    [(0, 1, 0, 1), (3, 1, 0, 1), (1, 0, 0, 1), (1, 2, 0, 1), (1, 1, 0, 4), (1, 1, 1, 1), (1, 1, 1 << 32, 1)],
)
def test_what_was_never_given_is_unknown(token: int, lease: int, word: int, bits: int) -> None:
    table = Table(2, 2)
    table.lease(worker())
    with pytest.raises(UnknownWorkError):
        table.rollouts.check_rows([(token, lease, word, bits)], 3, 1)


def test_leases_have_deadlines_and_holders_are_told() -> None:
    table = Table(1, 1, lease_deadline_s=5.0)
    first = worker()
    lease = table.lease(first)[0]
    assert lease.deadline_s == 5.0
    table.clock.advance(5.0)
    assert not table.rollouts.expire_overdue()
    table.clock.advance(0.1)
    assert table.rollouts.expire_overdue()
    assert first.log.notices[-1].content == LeasesCancelled((lease.number,))
    assert table.rollouts.pending_groups == 2


def test_cancelling_all_tells_every_holder_and_settles_nothing() -> None:
    table = Table(2, 2, 2)
    first, second = worker(0), worker(1)
    leases = table.lease(first, 2) + table.lease(second)
    table.report(leases[0].group, 1, first)
    table.rollouts.cancel_all()
    assert [n.content for n in first.log.notices] == [LeasesCancelled((1,)), LeasesCancelled((2,))]
    assert [n.content for n in second.log.notices] == [LeasesCancelled((3,))]
    assert table.settled == []
    assert table.rollouts.pending_groups == 3
    assert table.group(1).ready == 1
    assert table.lease(second)[0].mask == 0b10


# -- poison


def test_only_explicit_failures_poison_and_never_an_expiry_or_a_return() -> None:
    table = Table(1, poison_limit=2)
    first = worker()
    for _ in range(5):
        table.lease(first)
        table.rollouts.expire(first)
        table.lease(first)
        table.report(1, 1, first, "returned")
        table.lease(first)
        table.rollouts.cancel_all()
    assert table.settled == []
    table.lease(first)
    table.report(1, 1, first, "failed", reason="crash")
    assert table.settled == []
    table.lease(first)
    table.report(1, 1, first, "failed", reason="crash")
    assert table.settled == [(1, 1, "discarded", "poison:crash")]
    assert table.rollouts.unsettled_groups == 0


def test_one_lease_is_one_failure_however_many_rows_report_it() -> None:
    table = Table(192, poison_limit=2)
    first = worker()
    table.lease(first)
    for word in range(3):
        table.report(1, ((1 << 64) - 1) << 64 * word, first, "failed", reason="crash")
    assert table.group(1).failures == 1
    assert table.settled == []
    assert table.lease(first)[0].mask == (1 << 192) - 1
    for word in range(3):
        table.report(1, ((1 << 64) - 1) << 64 * word, first, "failed", reason="crash")
    assert sum(mask.bit_count() for _, mask, _, _ in table.settled) == 192


def test_a_poisoned_part_leaves_the_rest_to_train() -> None:
    table = Table(3, poison_limit=1)
    first = worker()
    table.lease(first)
    table.report(1, 0b001, first)
    table.report(1, 0b110, first, "failed", reason="crash")
    assert table.settled == [(1, 0b110, "discarded", "poison:crash")]
    assert table.rollouts.take(1) == [(1, 0b001)]


# -- large groups


def test_groups_of_more_than_64_completions() -> None:
    table = Table(150)
    first = worker()
    lease = table.lease(first)[0]
    assert lease.mask == (1 << 150) - 1
    for start, end in ((0, 64), (64, 128), (128, 150)):
        mask = (1 << end) - (1 << start)
        assert table.report(1, mask, first) == (mask, None)
    ((token, mask),) = table.rollouts.take(1)
    payloads = table.rollouts.payloads(token, mask)
    assert [p.completion for p in payloads] == list(range(150))
    assert [p.payload for p in payloads] == [f"payload-{i}".encode() for i in range(150)]
    assert table.dispose(token, mask, "trained") == sum(range(150))
    assert table.rollouts.buffered_bytes == 0


# -- minimum


def test_a_group_below_the_minimum_is_dropped_whole() -> None:
    table = Table(3, min_completions_per_group=2)
    first = worker()
    table.lease(first)
    table.report(1, 0b001, first, handles=True)
    table.report(1, 0b010, first, "discarded", reason="no good")
    assert table.rollouts.ready_groups == 0
    table.report(1, 0b100, first, "discarded", reason="no good")
    assert table.settled[-1] == (1, 0b001, "discarded", "below_minimum")
    assert first.log.notices[-1].content == PayloadsFreed(((1, 0b001),))
    assert table.rollouts.unsettled_groups == 0


def test_what_was_trained_counts_toward_the_minimum() -> None:
    table = Table(3, min_completions_per_group=2)
    first = worker()
    table.finish(table.lease(first)[0], first)
    table.rollouts.take(1)
    table.dispose(1, 0b011, "trained")
    table.dispose(1, 0b100, "payload_lost")
    lease = table.lease(first)[0]
    assert lease.mask == 0b100
    table.finish(lease, first)
    assert table.rollouts.take(1) == [(1, 0b100)]


# -- staleness


@pytest.mark.parametrize("on_stale", ["discard", "regenerate"])
def test_a_group_is_stale_by_its_lowest_version(on_stale: Any) -> None:
    table = Table(2, 1, max_staleness=1, on_stale=on_stale)
    first = worker()
    old, fresh = table.lease(first, 2)
    table.report(old.group, 0b01, first, version=3, handles=True)
    table.report(old.group, 0b10, first, version=5, handles=True)
    table.finish(fresh, first, version=5)
    assert not table.rollouts.drop_stale(4)
    assert table.rollouts.drop_stale(5)
    assert table.rollouts.take(5) == [(fresh.group, 1)]
    freed = [notice.content for notice in first.log.notices]
    assert freed == [PayloadsFreed(((old.group, 0b01),)), PayloadsFreed(((old.group, 0b10),))]
    if on_stale == "discard":
        assert table.settled == [(old.group, 0b11, "discarded", "stale")]
    else:
        assert table.settled == []
        assert table.lease(first)[0].mask == 0b11


def test_without_a_limit_nothing_is_stale() -> None:
    table = Table(1)
    first = worker()
    table.finish(table.lease(first)[0], first, version=0)
    assert not table.rollouts.drop_stale(1000)
    assert table.rollouts.ready_groups == 1


# -- dispositions and payloads


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1), (1, 3, 0, 2)])
def test_every_disposition_goes_where_it_should_in_any_order(order: tuple[int, ...]) -> None:
    table = Table(4)
    first = worker()
    table.finish(table.lease(first)[0], first, handles=True)
    table.rollouts.take(1)
    parts: list[tuple[int, Any, str]] = [
        (0b0001, "trained", ""),
        (0b0010, "discarded", "rejected"),
        (0b0100, "returned", ""),
        (0b1000, "payload_lost", ""),
    ]
    for index in order:
        mask, disposition, reason = parts[index]
        table.dispose(1, mask, disposition, reason)
    group = table.group(1)
    assert (group.pending, group.leased, group.ready, group.training) == (0b1000, 0, 0b0100, 0)
    assert sorted(table.settled) == [(1, 0b0001, "trained", ""), (1, 0b0010, "discarded", "rejected")]
    freed = [notice.content.rows for notice in first.log.notices]
    assert sorted(freed) == [((1, 0b0010),), ((1, 0b1000),)]
    assert table.rollouts.ready_groups == 0, "a group trains whole: its lost part is generated first"
    lease = table.lease(first)[0]
    table.finish(lease, first, handles=True)
    assert table.rollouts.take(1) == [(1, 0b1100)]
    assert [p.handle for p in table.rollouts.payloads(1, 0b1100)] == ["handle-2", "handle-3"]


def test_buffered_bytes_return_to_zero() -> None:
    table = Table(2, 2, 2)
    first = worker()
    for lease in table.lease(first, 3):
        table.finish(lease, first)
    assert table.rollouts.buffered_bytes == 6 * len(b"payload-0")
    table.rollouts.take(3)
    table.dispose(1, 0b11, "trained")
    table.dispose(2, 0b11, "discarded", "rejected")
    table.dispose(3, 0b01, "payload_lost")
    table.dispose(3, 0b10, "trained")
    assert table.rollouts.buffered_bytes == 0
    assert first.log.notices == [], "inline payloads are the controller's: nobody frees them"


def test_a_completion_that_was_reported_twice_is_rewarded_once() -> None:
    table = Table(3)
    first = worker()
    table.lease(first)
    table.report(1, 0b011, first, rewards=[1.0, 2.0])
    assert table.report(1, 0b110, first, rewards=[100.0, 4.0]) == (0b100, "ALREADY_REPORTED")
    assert table.rollouts.take(1) == [(1, 0b111)]
    assert table.dispose(1, 0b100, "trained") == 4.0
    assert table.dispose(1, 0b011, "trained") == 3.0


def test_a_completion_that_was_generated_again_is_rewarded_by_its_new_life() -> None:
    table = Table(2)
    first = worker()
    table.lease(first)
    table.report(1, 0b11, first, rewards=[1.0, 100.0])
    table.rollouts.take(1)
    table.dispose(1, 0b01, "returned")
    table.dispose(1, 0b10, "payload_lost")
    table.lease(first)
    table.report(1, 0b10, first, rewards=[2.0])
    ((token, mask),) = table.rollouts.take(1)
    assert table.dispose(token, mask, "trained") == 3.0


# -- how much may be out


def test_g9_what_is_to_be_expected_of_leases_counts_as_held() -> None:
    table = Table(*[2] * 20, max_buffered_bytes=100)
    first = worker()
    known = table.lease(first)[0]
    assert len(table.lease(first, 3)) == 3, "before the first payload nobody knows its size"
    table.finish(known, first)  # two payloads of 9 bytes; 6 more are out
    assert table.rollouts.buffered_bytes == 18
    # (18 + 54) bytes, and 18 more for each group: the last one may pass the limit.
    assert len(table.lease(first, 10)) == 2
    assert table.rollouts.is_full
    assert table.lease(first, 10) == []
    table.rollouts.expire(first)
    assert not table.rollouts.is_full
    assert table.rollouts.buffered_bytes == 18
    assert len(table.lease(first, 10)) == 5
    for token in [*table.rollouts._leased]:
        table.report(token, 0b01, first, "discarded", reason="no good")
        assert table.rollouts.is_full, "what is left of a group is not told apart"
    for token in [*table.rollouts._leased]:
        table.report(token, 0b10, first, "discarded", reason="no good")
    assert not table.rollouts.is_full


def test_g9_the_mean_size_of_payloads_follows_them_and_handles_take_no_room() -> None:
    table = Table(*[1] * 100, max_buffered_bytes=1000)
    first = worker()
    lease = table.lease(first)[0]
    table.finish(lease, first, handles=True)
    assert table.rollouts.buffered_bytes == 0
    assert len(table.lease(first, 90)) == 90
    assert not table.rollouts.is_full
    rollouts = table.rollouts
    for token in range(2, 60):
        assert table.report(token, 1, first) == (1, None)
    assert rollouts.buffered_bytes == 58 * 9
    assert rollouts._payload_bytes == pytest.approx(9)


def test_g9_one_group_is_always_leased_however_large() -> None:
    table = Table(4, 4, 4, max_buffered_bytes=1)
    first = worker()
    table.finish(table.lease(first)[0], first)
    for _ in range(2):
        assert table.lease(first, 2) == [], "a whole group is held"
        ((token, mask),) = table.rollouts.take(1)
        assert table.lease(first, 2) == [], "a command has it still"
        table.dispose(token, mask, "trained")
        (lease,) = table.lease(first, 2)
        assert table.lease(first, 2) == [], "it is out, and its payloads are to be expected"
        table.finish(lease, first)


def test_what_is_refused_of_a_row_is_told_in_the_rows_own_word() -> None:
    table = Table(192)
    first = worker()
    lease = table.lease(first)[0]
    assert table.report(1, 0b0110 << 128, first, "discarded", reason="no good") == (0b0110 << 128, None)
    row = {"leases": [lease.number], "groups": [1], "words": [2], "reason": "no good"}
    rows = RolloutRows(outcome="discarded", masks=[0b1110], **row)  # type: ignore[arg-type]
    assert table.rollouts.apply(first, rows) == [(0, "ALREADY_REPORTED", 0b0110)]


@pytest.mark.parametrize(
    ("rewards", "finite"),
    [([1e308, 1e308], True), ([1e308, -1e308], True), ([float("inf"), -1.0], False), ([float("nan"), 1.0], False)],
)
def test_rewards_are_finite_one_by_one(rewards: list[float], finite: bool) -> None:
    rows = RolloutRows(
        outcome="completed",
        groups=[1],
        leases=[1],
        masks=[3],
        lowest_versions=[0],
        highest_versions=[0],
        rewards=rewards,
    )
    if finite:
        assert rows.check_shape() == 2
    else:
        with pytest.raises(MalformedError):
            rows.check_shape()
