"""The controller as its edge uses it: the fence first, once only, and nobody hangs."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from core_harness import House, Worker, disposed_row, fingerprint, resume_from, rows

from cosmos_ctrl.core.admission import Batch, RowRefused, WeightAnnouncement
from cosmos_ctrl.core.commands import CompletionReport, DisposedRows, End, Save, Train
from cosmos_ctrl.core.errors import (
    ConflictingRetryError,
    ControlError,
    ExecutionEndedError,
    MalformedError,
    MessageTooLargeError,
    NotAllowedError,
    NotRegisteredError,
    SequenceGapError,
    StaleExecutionError,
    SupersededError,
    UnknownWorkError,
    WindowFullError,
    WrongStepError,
)
from cosmos_ctrl.core.execution import Place, WorkerInfo
from cosmos_ctrl.core.groups import LeasesCancelled, PayloadsFreed, RolloutRows
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt, Sampling

BATCH = Batch(number=1, digest=b"x")


def calls(house: House, worker: Worker, execution: str) -> dict[str, Callable[[], Any]]:
    """Every fenced call of the controller, under an execution ID."""
    core, session = house.controller, worker.session
    return {
        "register": lambda: core.register(
            execution or "x", WorkerInfo(place=Place("rollout", "n", 9, 0), incarnation="f" * 32)
        ),
        "hear": lambda: core.hear(execution, session),
        "heartbeat": lambda: core.heartbeat(execution, session, 0, 0),
        "submit": lambda: core.submit(execution, session, 0, 0, BATCH),
        "confirm": lambda: core.confirm(execution, session, worker.restored()),
        "report_damage": lambda: core.report_damage(execution, session, "a.pt", "digest"),
        "lease": lambda: core.lease(execution, session, 1, 1, last_call=True),
        "next_command": lambda: core.next_command(execution, session, 1),
        "payloads": lambda: core.payloads(execution, session, 1, None),
        "report_receipts": lambda: core.report_receipts(execution, session, 2, (), ""),
        "report_abandoned": lambda: core.report_abandoned(execution, session, 2, "disk full"),
        "report_committed": lambda: core.report_committed(execution, session, 2, "elsewhere"),
        "request_stop": lambda: core.request_stop(execution, session, "stop", None),
    }


def in_phase(phase: str) -> tuple[House, list[Worker]]:
    """A controller in `phase`, with work in every stage that the phase allows."""
    house = House(prompts=9, groups_per_step=1, save_every_steps=1, max_training_steps=0 if phase == "ENDED" else None)
    workers = [house.trainer(), house.rollout()]
    if phase in ("AWAITING_AGREEMENT", "ENDED"):
        return house, workers
    trainer, rollout = workers
    trainer.confirm()
    for lease in rollout.lease(3)[:2]:
        rollout.complete(lease)
    command = trainer.command(1)
    assert isinstance(command, Train)
    trainer.trained(command)
    if phase == "DRAINING":
        house.controller.stop("maintenance")
    elif phase == "FAILED":
        house.controller.fail("the disk is gone")
    assert house.controller.lifecycle.phase == phase
    return house, workers


# -- the fence (G5)


@pytest.mark.parametrize("phase", ["AWAITING_AGREEMENT", "RUNNING", "DRAINING", "ENDED", "FAILED"])
@pytest.mark.parametrize("stated", ["", "execution-2", "EXECUTION-1", "x" * 100])
def test_g5_a_request_of_another_execution_changes_nothing(phase: str, stated: str) -> None:
    house, workers = in_phase(phase)
    before = fingerprint(house.controller)
    refused = house.controller.fence.refused
    attempts = 0
    for worker in workers:
        for call in calls(house, worker, stated).values():
            with pytest.raises(StaleExecutionError):
                call()
            attempts += 1
    assert fingerprint(house.controller) == before
    assert house.controller.take_effects() == []
    assert house.controller.fence.refused - refused == attempts


def test_g5_the_fence_comes_before_the_session_and_the_session_before_the_failure() -> None:
    house, (_, rollout) = in_phase("FAILED")
    rollout.session = "unknown"
    for call in calls(house, rollout, "other").values():
        with pytest.raises(StaleExecutionError):
            call()
    for name, call in calls(house, rollout, "execution-1").items():
        if name != "register":
            with pytest.raises(NotRegisteredError):
                call()


def test_g5_a_process_without_an_id_is_told_it_and_one_with_a_wrong_one_is_refused() -> None:
    house = House()
    info = WorkerInfo(place=Place("rollout", "r", 0, 0), incarnation="a" * 32)
    assert house.controller.register("", info).session
    assert house.controller.register("execution-1", info).session
    with pytest.raises(StaleExecutionError):
        house.controller.register("execution-0", info)


@pytest.mark.parametrize("stated", ["", "whatever", "execution-1"])
def test_g11_a_legacy_controller_accepts_any_id_and_keeps_sessions_and_numbers(stated: str) -> None:
    house = House(execution_id="", number=0, prompts=2, groups_per_step=1, save_every_steps=1)
    trainer, rollout = house.trainer(), house.rollout()
    trainer.execution = rollout.execution = stated
    trainer.confirm()
    assert house.controller.lifecycle.gate_open
    number = 1
    for _ in range(2):
        rollout.complete(*rollout.lease())
        command = trainer.command(number)
        assert isinstance(command, Train), "a legacy controller publishes nothing, so it asks for no save"
        trainer.trained(command)
        number += 1
    end = trainer.command(number)
    assert isinstance(end, End)
    assert (end.reason, house.controller.lifecycle.phase) == ("BUDGET_EXHAUSTED", "ENDED")
    with pytest.raises(NotRegisteredError):
        house.controller.heartbeat(stated, "nobody", 0, 0)
    with pytest.raises(SequenceGapError):
        rollout.submit(number=99)


def test_g10_a_failure_told_a_thousand_times_does_not_grow() -> None:
    house, (trainer, _) = in_phase("FAILED")
    sizes = []
    for _ in range(50):
        with pytest.raises(ExecutionEndedError) as caught:
            trainer.heartbeat()
        sizes.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(sizes[1:])) == 1
    assert house.controller.lifecycle.failure is caught.value


# -- sessions and incarnations


def test_g9_a_trainer_that_falls_silent_ends_the_execution_with_a_cause() -> None:
    house, (trainer, rollout) = in_phase("RUNNING")
    house.clock.advance(14)
    rollout.heartbeat()
    house.clock.advance(2)
    house.controller.tick()
    assert house.controller.lifecycle.phase == "FAILED"
    with pytest.raises(ExecutionEndedError, match=r"trainer policy/0 was not heard for 16\.0 s"):
        rollout.heartbeat()
    with pytest.raises(NotRegisteredError):
        trainer.heartbeat()


def test_g1_a_silent_rollout_workers_groups_are_leased_again_first() -> None:
    house = House(prompts=9)
    trainer = house.open_gate()[0]
    silent, other = house.rollout(0), house.rollout(1)
    lost = silent.lease(2)
    other.lease(1)
    house.clock.advance(16)
    trainer.heartbeat()
    other.heartbeat()
    house.controller.tick()
    again = other.lease(3)
    assert [lease.group for lease in again[:2]] == [lease.group for lease in lost]
    assert [lease.prompt.key for lease in again] == ["0", "1", "3"]
    assert {lease.number for lease in again}.isdisjoint(lease.number for lease in lost)
    with pytest.raises(NotRegisteredError):
        silent.complete(lost[0])
    silent.register()
    silent.complete(lost[0])
    cancelled, refusal = silent.notices
    assert cancelled == LeasesCancelled(tuple(lease.number for lease in lost))
    assert (refusal.reason, refusal.group, refusal.mask) == ("LEASE_LOST", lost[0].group, 0b11)
    assert house.controller.statistics().lease_lost == 1
    assert house.controller.lifecycle.phase == "RUNNING"


def test_g6_another_session_of_the_same_process_keeps_its_leases_and_numbers() -> None:
    house = House()
    house.open_gate()
    worker = house.rollout()
    (lease,) = worker.lease()
    worker.register()
    worker.complete(lease)
    assert worker.notices == []
    assert house.controller.statistics().groups_ready == 1


def test_g5_a_paused_rollout_worker_cannot_evict_its_replacement() -> None:
    house = House()
    house.open_gate()
    paused = house.rollout()
    (lease,) = paused.lease()
    replacement = house.rollout()
    (again,) = replacement.lease()
    assert again.group == lease.group
    before = fingerprint(house.controller)
    with pytest.raises(NotRegisteredError):
        paused.complete(lease)
    with pytest.raises(SupersededError):
        paused.register()
    assert fingerprint(house.controller) == before
    replacement.complete(again)
    assert house.controller.statistics().groups_ready == 1


@pytest.mark.parametrize("phase", ["RUNNING", "DRAINING"])
def test_g3_a_new_trainer_process_after_the_gate_ends_the_execution(phase: str) -> None:
    house, (trainer, _) = in_phase(phase)
    with pytest.raises(ExecutionEndedError, match="fresh processes"):
        house.trainer()
    with pytest.raises(ExecutionEndedError):
        trainer.heartbeat()
    assert house.controller.lifecycle.phase == "FAILED"


def test_a_trainer_may_open_another_session_after_the_gate() -> None:
    house, (trainer, _) = in_phase("RUNNING")
    trainer.register()
    assert house.controller.lifecycle.phase == "RUNNING"
    assert isinstance(trainer.command(2), Save)


def test_a_trainer_that_is_no_rank_of_the_run_is_refused() -> None:
    house = House(trainer_groups=(("policy", 2),))
    for place in (Place("trainer", "policy", 0, 2), Place("trainer", "other", 0, 0), Place("trainer", "policy", 1, 0)):
        with pytest.raises(NotAllowedError, match="policy × 2"):
            house.worker(place)


def test_a_trainer_that_ends_early_ends_the_execution_and_a_rollout_worker_does_not() -> None:
    house = House()
    trainer = house.open_gate()[0]
    worker = house.rollout()
    (lease,) = worker.lease()
    worker.submit(end="preempted")
    assert house.controller.statistics().groups_pending == 1
    worker.complete(lease)
    assert worker.notices[-1].reason == "ENDED"
    reply = worker.lease_reply()
    assert reply is not None
    assert (reply.leases, reply.no_more) == ((), True)
    assert house.controller.lifecycle.phase == "RUNNING"
    trainer.submit(end="bored")
    assert house.controller.lifecycle.phase == "FAILED"


def test_everyone_knows_when_every_session_has_heard_the_end() -> None:
    house, (trainer, rollout) = in_phase("ENDED")
    assert not house.controller.everyone_knows
    trainer.submit(end="done")
    assert not house.controller.everyone_knows
    rollout.submit(end="done")
    assert house.controller.everyone_knows
    house, workers = in_phase("FAILED")
    for worker in workers:
        assert not house.controller.everyone_knows
        with pytest.raises(ExecutionEndedError):
            worker.heartbeat()
    assert house.controller.everyone_knows


# -- batches (G6)


def test_g6_a_batch_applies_once_however_often_it_comes() -> None:
    house = House(n=3)
    house.open_gate()
    worker = house.rollout()
    (lease,) = worker.lease()
    batch = Batch(
        number=1,
        digest=b"same",
        rollouts=(rows("completed", (lease, 0b001)), rows("failed", (lease, 0b010)), rows("discarded", (lease, 0b100))),
    )
    core = house.controller
    first = core.submit("execution-1", worker.session, 0, 0, batch)
    before = fingerprint(core)
    for _ in range(3):
        assert core.submit("execution-1", worker.session, 0, 0, batch) == first
        assert fingerprint(core) == before
    assert house.settled("discarded") == 1


def test_g6_the_same_number_with_other_content_is_a_conflict_and_a_gap_a_gap() -> None:
    house = House()
    house.open_gate()
    worker = house.rollout()
    core = house.controller
    core.submit("execution-1", worker.session, 0, 0, Batch(number=1, digest=b"a"))
    with pytest.raises(ConflictingRetryError):
        core.submit("execution-1", worker.session, 0, 0, Batch(number=1, digest=b"b"))
    with pytest.raises(SequenceGapError) as caught:
        core.submit("execution-1", worker.session, 0, 0, Batch(number=3, digest=b"a"))
    assert caught.value.expected == 2
    assert worker.heartbeat().applied == 1


def test_g6_refusals_are_repeated_until_they_are_confirmed() -> None:
    house = House()
    house.open_gate()
    worker = house.rollout()
    (lease,) = worker.lease()
    worker.complete(lease)
    core = house.controller
    batch = Batch(number=2, digest=b"late", rollouts=(rows("completed", (lease, 0b01)),))
    first = core.submit("execution-1", worker.session, 1, 0, batch)
    assert [notice.content for notice in first.notices] == [RowRefused(2, 0, 0, "LEASE_LOST", lease.group, 0, 0b01)]
    worker.register()
    assert core.submit("execution-1", worker.session, 1, 0, batch) == first
    assert core.heartbeat("execution-1", worker.session, 2, 1).notices == ()


def broken_batches(lease: Any) -> dict[str, Any]:
    good = rows("completed", (lease, 0b01))
    values = {name: getattr(good, name) for name in RolloutRows.__slots__}

    def changed(**overrides: Any) -> RolloutRows:
        return RolloutRows(**values | overrides)

    return {
        "never issued": changed(groups=[lease.group + 1000]),
        "another execution's group": changed(groups=[7]),
        "never leased": changed(leases=[lease.number + 1000]),
        "lease zero": changed(leases=[0]),
        "mask outside": changed(masks=[0b100]),
        "word outside": changed(words=[1]),
        "enormous word": changed(words=[(1 << 32) - 1]),
        "no completions": changed(masks=[0], rewards=[]),
        "rewards missing": changed(rewards=[]),
        "leases missing": changed(leases=[]),
        "masks missing": changed(masks=[]),
        "words unequal": changed(words=[0, 0]),
        "versions missing": changed(lowest_versions=[]),
        "versions crossed": changed(lowest_versions=[1], highest_versions=[0]),
        "payloads missing": changed(payloads=[b"a", b"b"]),
        "both kinds": changed(payloads=[b"a"], handles=["a"]),
        "a reason": changed(reason="why"),
        "no reason": changed(outcome="discarded", lowest_versions=[], highest_versions=[], rewards=[]),
        "rewards of a discard": changed(outcome="discarded", lowest_versions=[], highest_versions=[], reason="dull"),
        "payloads of a failure": changed(
            outcome="failed", lowest_versions=[], highest_versions=[], rewards=[], reason="oom", payloads=[b"a"]
        ),
        "versions of a return": changed(outcome="returned", rewards=[]),
    }


@pytest.mark.parametrize("name", broken_batches(type("L", (), {"group": 1, "number": 1, "mask": 1})()))
def test_g6_a_batch_with_one_impossible_row_is_refused_whole(name: str) -> None:
    house = House()
    house.open_gate()
    worker = house.rollout()
    first, second = worker.lease(2)
    before = fingerprint(house.controller)
    broken = broken_batches(second)[name]
    with pytest.raises((MalformedError, UnknownWorkError)):
        worker.submit(rollouts=(rows("completed", (first, 0b11)), broken))
    assert fingerprint(house.controller) == before
    assert house.controller.lifecycle.phase == "RUNNING"
    worker.complete(first)


def test_g10_an_enormous_word_of_a_retired_group_costs_nothing() -> None:
    house = House()
    house.open_gate()
    worker = house.rollout()
    (lease,) = worker.lease()
    worker.report("discarded", (lease, lease.mask))
    late = RolloutRows(
        outcome="returned", groups=[lease.group], leases=[lease.number], masks=[1], words=[(1 << 32) - 1]
    )
    worker.submit(rollouts=(late,))
    assert worker.notices[-1] == RowRefused(2, 0, 0, "RETIRED", lease.group, (1 << 32) - 1, 1)


def test_a_row_that_is_late_is_refused_by_itself_and_the_others_apply() -> None:
    house = House(n=3, prompts=9)
    house.open_gate()
    worker, other = house.rollout(0), house.rollout(1)
    gone, partly, good = worker.lease(3)
    worker.report("discarded", (gone, gone.mask))
    worker.report("completed", (partly, 0b001))
    (foreign,) = other.lease()
    batch = (rows("completed", (gone, 0b1), (partly, 0b011), (foreign, 0b111), (good, 0b111)),)
    worker.submit(rollouts=batch)
    assert [(n.row, n.reason, n.group, n.mask) for n in worker.notices] == [
        (0, "RETIRED", gone.group, 0b1),
        (1, "ALREADY_REPORTED", partly.group, 0b001),
        (2, "LEASE_LOST", foreign.group, 0b111),
    ]
    assert house.controller.statistics().groups_ready == 1
    assert house.settled() == 3


def test_groups_of_more_than_64_completions_report_by_word() -> None:
    house = House(prompts=2, n=130, groups_per_step=1)
    trainer = house.open_gate()[0]
    worker = house.rollout()
    (lease,) = worker.lease()
    worker.complete(lease, payloads=[str(i).encode() for i in range(130)])
    command = trainer.command(1)
    assert isinstance(command, Train)
    assert command.rows == ((lease.group, (1 << 130) - 1),)
    (found,) = house.controller.payloads("execution-1", trainer.session, 1, None)
    assert [(p.completion, p.payload) for p in found.completions] == [(i, str(i).encode()) for i in range(130)]
    trainer.trained(command)
    assert house.settled("trained") == 130
    worker.complete(*worker.lease())
    late = rows("completed", (lease, 1 << 129))
    worker.submit(rollouts=(late,))
    assert (worker.notices[-1].word, worker.notices[-1].mask) == (2, 0b10)


def test_roles_keep_to_their_reports() -> None:
    house = House()
    trainer, worker = house.open_gate()[0], house.rollout()
    (lease,) = worker.lease()
    report = CompletionReport(command=1, step=1, optimizer_updates=1)
    for who, parts in (
        (trainer, {"rollouts": (rows("completed", (lease, 1)),)}),
        (worker, {"completions": (report,)}),
        (worker, {"weights": (WeightAnnouncement(0, "w"),)}),
    ):
        with pytest.raises(NotAllowedError):
            who.submit(**parts)
    with pytest.raises(NotAllowedError):
        trainer.lease()
    assert house.controller.lifecycle.phase == "RUNNING"


def test_g10_batches_and_metrics_have_limits() -> None:
    house = House(max_batch_completions=3, max_unacknowledged_batches=2)
    house.open_gate()
    worker = house.rollout()
    leases = worker.lease(2)
    with pytest.raises(MessageTooLargeError):
        worker.complete(*leases)
    worker.submit(metrics=tuple((f"m{i}", 1.0) for i in range(65)))
    core = house.controller
    assert len(core.workers.of(worker.session).metrics) == 64
    for number in (2, 3):
        core.submit("execution-1", worker.session, 1, 0, Batch(number=number, digest=b"x"))
    with pytest.raises(WindowFullError):
        core.submit("execution-1", worker.session, 1, 0, Batch(number=4, digest=b"x"))
    core.submit("execution-1", worker.session, 3, 0, Batch(number=4, digest=b"x"))
    (incarnation,) = [w for w in core.workers if w.place.role == "rollout"]
    assert incarnation.metrics.keys() == {f"m{i}" for i in range(64)}


def test_a_command_reported_twice_in_one_batch_is_malformed() -> None:
    house = House(groups_per_step=1)
    trainer, worker = house.open_gate()[0], house.rollout()
    worker.complete(*worker.lease())
    command = trainer.command(1)
    assert isinstance(command, Train)
    report = CompletionReport(
        command=1,
        step=1,
        optimizer_updates=1,
        disposed=(DisposedRows("trained", command.rows),),
    )
    with pytest.raises(MalformedError):
        trainer.submit(completions=(report, report))
    assert house.settled() == 0


# -- steps


@pytest.mark.parametrize("change", [{"step": 2}, {"command": 2}, {"optimizer_updates": 9}])
def test_g3_a_wrong_step_ends_the_execution_for_everyone(change: dict[str, int]) -> None:
    house = House(groups_per_step=1, trainer_groups=(("policy", 2),))
    leader, second = house.open_gate()
    worker = house.rollout()
    worker.complete(*worker.lease())
    command = leader.command(1)
    assert isinstance(command, Train)
    leader.trained(command)
    report = CompletionReport(**{"command": 1, "step": 1, "optimizer_updates": 1} | change)
    with pytest.raises(WrongStepError):
        second.submit(completions=(report,))
    assert house.settled() == 0
    for call in (leader.heartbeat, worker.heartbeat, lambda: leader.command(2)):
        with pytest.raises(WrongStepError):
            call()


def test_g6_a_repeated_completion_report_commits_once() -> None:
    house = House(groups_per_step=1)
    trainer, worker = house.open_gate()[0], house.rollout()
    worker.complete(*worker.lease())
    command = trainer.command(1)
    assert isinstance(command, Train)
    trainer.trained(command)
    trainer.trained(command)  # under another number: the same report again
    assert house.controller.commands.steps == 1
    assert house.controller.commands.updates == 1
    assert house.settled("trained") == 2


# -- leases


def test_g6_a_request_for_leases_has_one_answer() -> None:
    house = House()
    house.open_gate()
    worker = house.rollout()
    reply = worker.lease_reply(2)
    assert reply is not None
    assert worker.lease_reply(1, number=1) is reply
    assert house.controller.ledger.cursor.remaining_completions == 8
    for number in (0, 3, 99):
        with pytest.raises(SequenceGapError) as caught:
            worker.lease_reply(1, number=number)
        assert caught.value.expected == 2
    with pytest.raises(MalformedError):
        worker.lease_reply(0)


def test_a_request_that_finds_nothing_waits_and_keeps_its_number() -> None:
    house = House(prompts=1)
    house.open_gate()
    worker, other = house.rollout(0), house.rollout(1)
    worker.lease()
    assert other.lease_reply(1, last_call=False) is None
    worker.submit(end="preempted")
    reply = other.lease_reply(1, number=1, last_call=False)
    assert reply is not None
    assert len(reply.leases) == 1
    empty = other.lease_reply(1, last_call=True)
    assert empty is not None
    assert (empty.leases, empty.no_more) == ((), False)
    assert other.lease_reply(1, number=2) is empty


def test_no_lease_before_the_restored_weights_are_announced() -> None:
    house = House(announces_weights=True, groups_per_step=1, save_every_steps=1, trainer_groups=(("policy", 2),))
    leader, second = house.open_gate()
    worker = house.rollout()
    assert worker.lease() == []
    second.announce(0)  # may repeat what the leader says, and counts for nothing
    assert worker.lease() == []
    leader.announce(0)
    (lease,) = worker.lease()
    worker.complete(lease)
    command = leader.command(1)
    assert isinstance(command, Train)
    for trainer in (leader, second):
        trainer.trained(command)
    save = leader.command(2)
    assert isinstance(save, Save)
    resumed = resume_from(save, announces_weights=True, trainer_groups=(("policy", 2),))
    leader = resumed.open_gate()[0]
    worker = resumed.rollout()
    leader.announce(0)
    assert worker.lease() == []
    leader.announce(1)
    reply = worker.lease_reply()
    assert reply is not None
    assert reply.weights == WeightAnnouncement(1, "weights-1")
    leader.announce(0)
    assert resumed.controller.statistics().weights_version == 1


def test_versions_are_not_looked_at_where_none_are_announced() -> None:
    house = House(groups_per_step=1, trainer_groups=(("policy", 2),))
    leader, second = house.open_gate()
    worker = house.rollout()
    worker.complete(*worker.lease())
    command = leader.command(1)
    assert isinstance(command, Train)
    leader.trained(command)
    (lease,) = worker.lease()
    worker.complete(lease, version=1)  # the leader has completed step 1, the other rank has not said so yet
    assert not command.committed
    second.trained(command)


# -- payloads


def test_payloads_are_fetched_by_share_until_the_commit() -> None:
    house = House(groups_per_step=3, trainer_groups=(("policy", 2),))
    trainers = [house.trainer(rank, dp_rank=rank, dp_size=2) for rank in (0, 1)]
    for trainer in trainers:
        trainer.confirm()
    worker = house.rollout()
    leases = worker.lease(3)
    for lease in leases:
        worker.complete(lease, payloads=[f"{lease.group}:{i}".encode() for i in range(2)], codec="text")
    command = trainers[0].command(1)
    assert isinstance(command, Train)
    core = house.controller
    shares = [core.payloads("execution-1", trainer.session, 1, None) for trainer in trainers]
    assert [[found.group for found in share] for share in shares] == [
        [leases[0].group, leases[2].group],
        [leases[1].group],
    ]
    assert core.payloads("execution-1", trainers[0].session, 1, 1) == shares[1]
    assert [p.payload for p in shares[1][0].completions] == [f"{leases[1].group}:{i}".encode() for i in range(2)]
    with pytest.raises(UnknownWorkError):
        core.payloads("execution-1", trainers[0].session, 1, 2)
    with pytest.raises(UnknownWorkError):
        core.payloads("execution-1", trainers[0].session, 2, None)
    for trainer in trainers:
        trainer.trained(command)
    with pytest.raises(NotAllowedError):
        core.payloads("execution-1", trainers[0].session, 1, None)


def test_a_handle_goes_back_to_its_producer_when_its_completion_does() -> None:
    house = House(n=4, groups_per_step=1)
    trainer, worker = house.open_gate()[0], house.rollout()
    (lease,) = worker.lease()
    worker.complete(lease, handles=["a", "b", "c", "d"])
    command = trainer.command(1)
    assert isinstance(command, Train)
    group = lease.group
    trainer.trained(
        command,
        disposed=[
            disposed_row(group, 0b0001, "trained"),
            disposed_row(group, 0b0010, "discarded", "dull"),
            disposed_row(group, 0b0100, "returned"),
            disposed_row(group, 0b1000, "payload_lost"),
        ],
    )
    worker.heartbeat()
    assert worker.notices == [PayloadsFreed(((group, 0b0010),)), PayloadsFreed(((group, 0b1000),))]


# -- saves over the controller


def test_an_application_that_owns_its_checkpoints_reports_them() -> None:
    house = House(groups_per_step=1, save_every_steps=1, application_owns_checkpoints=True)
    trainer, worker = house.open_gate()[0], house.rollout()
    worker.complete(*worker.lease())
    command = trainer.command(1)
    assert isinstance(command, Train)
    trainer.trained(command)
    save = trainer.command(2)
    assert isinstance(save, Save)
    with pytest.raises(NotAllowedError):
        trainer.saved(save)
    core = house.controller
    for _ in range(2):
        core.report_committed("execution-1", trainer.session, save.number, "mine/step1")
    with pytest.raises(ConflictingRetryError):
        core.report_committed("execution-1", trainer.session, save.number, "mine/other")
    assert (save.state, save.path) == ("COMMITTED", "mine/step1")
    assert core.take_effects() == []
    ours = House(groups_per_step=1, save_every_steps=1)
    trainer, worker = ours.open_gate()[0], ours.rollout()
    worker.complete(*worker.lease())
    command = trainer.command(1)
    assert isinstance(command, Train)
    trainer.trained(command)
    with pytest.raises(NotAllowedError):
        ours.controller.report_committed("execution-1", trainer.session, 2, "mine/step1")


def test_receipts_name_what_the_rank_declared() -> None:
    house, (trainer, _) = in_phase("RUNNING")
    save = trainer.command(2)
    assert isinstance(save, Save)
    for change in (
        {"name": "other.pt"},
        {"execution_id": "execution-0"},
        {"completed_training_steps": 0},
        {"size_bytes": 0},
    ):
        with pytest.raises(ControlError):
            trainer.saved(save, **change)
    assert save.state == "PENDING"
    assert house.controller.take_effects() == []
    trainer.saved(save, note='{"run": 1}')
    trainer.saved(save)
    assert [effect.save for effect in house.controller.take_effects()] == [save]  # type: ignore[union-attr]
    house.controller.publication_succeeded(save, "sha256:x")
    assert trainer.saved(save).state == "COMMITTED"
    statistics = house.controller.statistics()
    assert (statistics.last_save, statistics.saves_pending) == (save, 0)


def test_statistics_tell_the_run_as_it_is() -> None:
    house, _ = in_phase("RUNNING")
    house.clock.advance(5)
    found = house.controller.statistics()
    assert (found.phase, found.completed_training_steps, found.completed_optimizer_updates) == ("RUNNING", 1, 1)
    assert (found.remaining_completions, found.safe_remaining_completions, found.epoch) == (12, 16, 1)
    assert (found.window_draws, found.window_completions, found.gap_age_s) == (2, 4, 5.0)
    assert (found.groups_pending, found.groups_leased, found.groups_ready, found.groups_training) == (0, 1, 1, 0)
    assert (found.trained_completions, found.discarded_completions, found.saves_pending) == (2, 0, 1)
    assert found.blocking_group == house.controller.ledger.statistics().blocking_token
    assert found.end is None


def test_group_numbers_name_one_group_over_all_executions() -> None:
    first = House(number=1)
    first.open_gate()
    (old,) = first.rollout().lease()
    second = House(number=2)
    second.open_gate()
    worker = second.rollout()
    (new,) = worker.lease()
    assert new.group > old.group + (1 << 39)
    with pytest.raises(UnknownWorkError):
        worker.submit(rollouts=(rows("completed", (old, 1)),))


def test_g3_a_trainer_of_another_world_size_is_refused() -> None:
    house = House(trainer_groups=(("policy", 2),))
    with pytest.raises(NotAllowedError, match="policy × 2"):
        house.trainer(0, world_size=3)
    assert house.controller.lifecycle.phase == "AWAITING_AGREEMENT"


def test_g9_a_step_has_a_deadline_and_names_who_hangs() -> None:
    house = House(groups_per_step=1, trainer_groups=(("policy", 2),), step_timeout_s=100.0, session_ttl_s=1000.0)
    leader, second = house.open_gate()
    worker = house.rollout()
    worker.complete(*worker.lease())
    command = leader.command(1)
    assert isinstance(command, Train)
    leader.trained(command)
    house.clock.advance(100)
    house.controller.tick()
    assert house.controller.lifecycle.phase == "RUNNING"
    house.clock.advance(1)
    house.controller.tick()
    with pytest.raises(ExecutionEndedError, match=r"trainer policy/1 did not complete step 1"):
        second.heartbeat()
    assert house.settled() == 0


def test_g10_a_reply_with_prompts_fits_a_message() -> None:
    big = Prompt(key="big", payload=b"x" * 20_000)
    sampling = Sampling(SeekableSampler(9, shuffle=False), prompt_of=lambda index: big, completions_per_prompt=1)
    house = House(max_message_bytes=100_000, sampling=sampling, budget=9)
    house.open_gate()
    worker = house.rollout()
    first = worker.lease(9)
    assert sum(lease.prompt.size_bytes for lease in first) <= 100_000
    assert len(first) + len(worker.lease(9)) + len(worker.lease(9)) == 9
    late = house.rollout(1)
    worker.submit(end="preempted")
    assert len(late.lease(9)) == len(first)


def test_g10_a_prompt_that_fits_no_message_ends_the_execution() -> None:
    big = Prompt(key="big", payload=b"x" * 60_000)
    sampling = Sampling(SeekableSampler(9, shuffle=False), prompt_of=lambda index: big, completions_per_prompt=1)
    house = House(max_message_bytes=100_000, sampling=sampling, budget=9)
    house.open_gate()
    worker = house.rollout()
    with pytest.raises(ValueError, match="big"):
        worker.lease(1)
    assert house.controller.lifecycle.phase == "FAILED"


def test_a_replica_has_ended_when_all_its_reporting_ranks_have() -> None:
    house = House()
    house.open_gate()
    first, second = (house.worker(Place("rollout", "pool", 3, rank), world_size=2) for rank in (0, 1))
    leases = [first.lease()[0], second.lease()[0]]
    first.submit(end="done")
    first.complete(leases[0])
    assert first.notices[-1].reason == "LEASE_LOST"  # its own leases are over, its replica is not
    second.complete(leases[1])
    assert not second.notices
    second.submit(end="done")
    for worker, lease in zip((first, second), leases, strict=True):
        worker.complete(lease)
        assert worker.notices[-1].reason in ("ENDED", "RETIRED")
    assert first.notices[-1].reason == "ENDED"


# -- late limits


def test_time_in_which_nobody_could_be_heard_is_not_held_against_the_workers() -> None:
    house = House(session_ttl_s=10.0)
    house.open_gate()
    house.clock.advance(30.0)
    house.controller.workers.excuse(30.0)
    house.controller.tick()
    assert house.controller.lifecycle.phase == "RUNNING"
    house.clock.advance(10.5)
    house.controller.tick()
    assert house.controller.lifecycle.phase == "FAILED"


def test_g10_a_payload_that_could_not_go_out_again_with_its_prompt_is_refused_whole() -> None:
    house = House(max_message_bytes=1 << 16)
    house.open_gate()
    worker = house.rollout()
    (lease,) = worker.lease()
    before = fingerprint(house.controller)
    with pytest.raises(MessageTooLargeError):
        worker.complete(lease, payloads=[b"x" * (1 << 15), b"x" * ((1 << 15) + 1)])
    assert fingerprint(house.controller) == before
    worker.complete(lease, payloads=[b"x" * (1 << 15)] * 2)


def test_a_digest_that_could_not_be_published_is_refused_at_its_rank() -> None:
    house = House(groups_per_step=1, save_every_steps=1)
    trainer, worker = house.open_gate()[0], house.rollout()
    worker.complete(*worker.lease())
    command = trainer.command(1)
    assert isinstance(command, Train)
    trainer.trained(command)
    save = trainer.command(2)
    assert isinstance(save, Save)

    def known(digest: str) -> None:
        if not digest.startswith("sha256:"):
            raise ValueError(f"{digest} is of no known algorithm")

    house.controller._check_digest = known
    with pytest.raises(MalformedError, match="no known algorithm"):
        trainer.saved(save, digest="md5:00")
    assert save.state == "PENDING"
    trainer.saved(save, digest="sha256:00")
    assert save.state == "PUBLISHING"
