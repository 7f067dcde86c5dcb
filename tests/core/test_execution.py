"""The fence, places, sessions, and what each incarnation was told (G5, G6, G10)."""

from __future__ import annotations

from typing import Any

import pytest
from core_harness import Clock, counted_ids
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cosmos_ctrl.core import execution
from cosmos_ctrl.core.errors import (
    ConflictingRetryError,
    MalformedError,
    NotRegisteredError,
    SequenceGapError,
    StaleExecutionError,
    SupersededError,
    WindowFullError,
    WorkerLimitError,
)
from cosmos_ctrl.core.execution import BatchLog, ExecutionIdentity, Fence, Place, WorkerInfo, Workers


@pytest.mark.parametrize("stated", ["", "execution-1x", "execution-", "EXECUTION-1", "other"])
def test_g5_another_id_or_none_is_refused_and_counted(stated: str) -> None:
    fence = Fence(ExecutionIdentity(1, "execution-1"))
    with pytest.raises(StaleExecutionError) as caught:
        fence.check(stated)
    assert (caught.value.stated, caught.value.current) == (stated, "execution-1")
    assert fence.refused == 1
    fence.check("execution-1")
    assert fence.refused == 1


@pytest.mark.parametrize("stated", ["", "anything"])
def test_g11_legacy_accepts_any_id(stated: str) -> None:
    fence = Fence(ExecutionIdentity(0, ""))
    fence.check(stated)
    assert fence.refused == 0


# -- batches


class BatchMachine(RuleBasedStateMachine):
    """A client that repeats, skips, forges and confirms, against a list of what was applied."""

    LIMIT = 4

    def __init__(self) -> None:
        super().__init__()
        self.log = BatchLog(max_unacknowledged=self.LIMIT)
        self.applied: list[bytes] = []
        self.acked = 0
        self.told: list[int] = []
        self.confirmed = 0

    @rule(number=st.integers(0, 12), content=st.sampled_from([b"a", b"b"]))
    def send(self, number: int, content: bytes) -> None:
        if number == 0:
            with pytest.raises(MalformedError):
                self.log.is_repeat(0, content)
        elif number <= self.acked:
            assert self.log.is_repeat(number, content)
        elif number <= len(self.applied):
            if self.applied[number - 1] == content:
                assert self.log.is_repeat(number, content)
            else:
                with pytest.raises(ConflictingRetryError):
                    self.log.is_repeat(number, content)
        elif number > len(self.applied) + 1:
            with pytest.raises(SequenceGapError) as caught:
                self.log.is_repeat(number, content)
            assert caught.value.expected == len(self.applied) + 1
        elif number - self.acked > self.LIMIT:
            with pytest.raises(WindowFullError):
                self.log.is_repeat(number, content)
        else:
            assert not self.log.is_repeat(number, content)
            self.log.record(number, content)
            self.applied.append(content)

    @rule(content=st.integers())
    def tell(self, content: int) -> None:
        self.log.notify(content)
        self.told.append(content)

    @rule(acked=st.integers(0, 14), notices=st.integers(0, 14))
    def confirm(self, acked: int, notices: int) -> None:
        if acked > len(self.applied) or notices > len(self.told):
            with pytest.raises(MalformedError):
                self.log.confirm(acked, notices)
            return
        self.log.confirm(acked, notices)
        self.acked, self.confirmed = max(self.acked, acked), max(self.confirmed, notices)

    @invariant()
    def notices_come_until_they_are_confirmed(self) -> None:
        expected = list(enumerate(self.told, 1))[self.confirmed :]
        assert [(notice.number, notice.content) for notice in self.log.notices] == expected

    @invariant()
    def numbers_are_cumulative(self) -> None:
        assert self.log.applied == len(self.applied)


TestBatchLog = BatchMachine.TestCase
TestBatchLog.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_g10_a_client_that_confirms_no_notice_may_not_report_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_MAX_NOTICES", 3)
    log = BatchLog(max_unacknowledged=8)
    for number in range(3):
        log.notify(number)
    with pytest.raises(WindowFullError) as caught:
        log.is_repeat(1, b"a")
    assert caught.value.limit == 3
    log.confirm(0, 1)
    assert not log.is_repeat(1, b"a")


# -- places


def info(incarnation: str, *, place: Place | None = None, **overrides: Any) -> WorkerInfo:
    return WorkerInfo(place=place or Place("rollout", "r", 0, 0), incarnation=incarnation * 32, **overrides)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def workers(clock: Clock) -> Workers:
    return Workers(max_workers=4, max_unacknowledged=8, session_ttl_s=10.0, clock=clock, new_id=counted_ids())


def test_g5_a_paused_old_incarnation_can_never_evict_its_replacement(workers: Workers, clock: Clock) -> None:
    old = workers.register(info("a")).worker
    old_session = old.session
    new = workers.register(info("b"))
    assert new.retired is old
    assert new.new
    for _ in range(3):
        with pytest.raises(SupersededError):
            workers.register(info("a"))
        with pytest.raises(NotRegisteredError):
            workers.of(old_session)
        clock.advance(100)
    workers.lapse(new.worker)
    with pytest.raises(SupersededError):
        workers.register(info("a"))
    assert workers.at(old.place) is new.worker


def test_g6_numbers_go_on_through_the_sessions_of_one_incarnation(workers: Workers) -> None:
    first = workers.register(info("a"))
    first.worker.log.record(1, b"x")
    session = first.worker.session
    again = workers.register(info("a"))
    assert again.worker is first.worker
    assert (again.new, again.retired) == (False, None)
    assert again.worker.log.applied == 1
    assert again.worker.session != session
    with pytest.raises(NotRegisteredError):
        workers.of(session)
    assert workers.of(again.worker.session) is first.worker


def test_places_do_not_mix(workers: Workers) -> None:
    places = [
        Place("rollout", "r", 0, 0),
        Place("rollout", "r", 1, 0),
        Place("rollout", "s", 0, 0),
        Place("trainer", "r", 0, 0),
    ]
    found = [workers.register(info(letter, place=place)).worker for letter, place in zip("abcd", places, strict=True)]
    assert len({id(worker) for worker in found}) == 4
    assert list(workers) == found


def test_g10_the_number_of_remembered_processes_is_limited(workers: Workers) -> None:
    for letter in "abcd":
        workers.register(info(letter))
    with pytest.raises(WorkerLimitError) as caught:
        workers.register(info("e"))
    assert (caught.value.limit, caught.value.found) == (4, 5)
    assert not workers.register(info("d")).new
    with pytest.raises(SupersededError):
        workers.register(info("a"))


def test_a_session_lives_as_long_as_something_is_heard(workers: Workers, clock: Clock) -> None:
    worker = workers.register(info("a")).worker
    for _ in range(5):
        clock.advance(9)
        assert workers.silent() == []
        workers.hear(worker.session)
    clock.advance(10.5)
    assert workers.silent() == [worker]
    assert workers.silence_s(worker) == 10.5
    session = worker.session
    workers.lapse(worker)
    assert workers.silent() == []
    with pytest.raises(NotRegisteredError):
        workers.hear(session)
    with pytest.raises(NotRegisteredError):
        workers.of("")
    workers.register(info("a"))
    assert workers.silent() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"place": Place("rollout", "", 0, 0)},
        {"incarnation": "short"},
        {"place": Place("rollout", "r", 0, 1)},
        {"world_size": 0},
        {"dp_rank": 1},
        {"dp_size": 0},
    ],
)
def test_an_impossible_worker_is_malformed(wrong: dict[str, Any]) -> None:
    with pytest.raises(MalformedError):
        WorkerInfo(**{"place": Place("rollout", "r", 0, 0), "incarnation": "a" * 32} | wrong)


def test_a_worker_is_named_so_that_a_person_finds_it(workers: Workers) -> None:
    worker = workers.register(info("a", host="node7", pid=42, place=Place("rollout", "r", 3, 0))).worker
    assert str(worker) == "rollout r.3/0 (node7, process 42)"
    assert str(Place("trainer", "policy", 0, 1)) == "trainer policy/1"
