"""G6: a report, a lease and a command take effect once, however often they are sent again, and in whatever session."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from service_harness import House, Worker, completed, deep, disposed, refusal, soon, until

from cosmos_ctrl.core.errors import (
    AwaitingAgreementError,
    ConflictingRetryError,
    MalformedError,
    MessageTooLargeError,
    NotAllowedError,
    NotRegisteredError,
    ResumeMetadataMismatch,
    SequenceGapError,
    SupersededError,
    UnknownWorkError,
    WindowFullError,
    WrongStepError,
)
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2

RETURNED = reports_pb2.OUTCOME_RETURNED
DISCARDED = reports_pb2.OUTCOME_DISCARDED
FAILED = reports_pb2.OUTCOME_FAILED


def effects(house: House) -> Any:
    """What a report, a lease or a command may change: without who was heard when."""
    core = house.core
    parts = (core.ledger, core.rollouts, core.commands, core.lifecycle, core.leasing, core.training, core.statistics())
    return [deep(part) for part in parts], deep(house.journal)


def copy(batch: reports_pb2.ReportBatch) -> reports_pb2.ReportBatch:
    return reports_pb2.ReportBatch.FromString(batch.SerializeToString())


async def running(houses, **options: Any) -> tuple[House, list[Worker], Worker]:
    house = await houses(**{"ranks": 1} | options)
    return house, await house.trainers(), await house.rollout()


async def lapse(house: House, worker: Worker) -> None:
    """The worker falls silent for long enough, and nobody else does."""
    for _ in range(3):
        house.pass_time(6)
        for other in list(house.core.workers):
            if other.info.incarnation != worker.incarnation and other.session:
                house.core.hear(house.core.identity.id, other.session)
    assert isinstance(await refusal(worker.submit()), NotRegisteredError)


# -- batches


async def test_the_same_batch_in_the_same_session_applies_once(houses):
    house, _, rollout = await running(houses)
    groups = (await rollout.lease(2)).groups
    batch = completed(groups)
    ack = await rollout.submit(batch)
    before = effects(house)
    for _ in range(3):
        assert await rollout.submit(copy(batch), number=1) == ack
    assert effects(house) == before
    assert house.core.statistics().groups_ready == 2


async def test_the_same_batch_in_a_new_session_after_a_lapse_applies_once(houses):
    house, _, rollout = await running(houses)
    groups = (await rollout.lease(2)).groups
    batch = completed(groups[:1])
    await rollout.submit(batch)
    old = rollout.session
    await lapse(house, rollout)
    response = await rollout.register()
    assert response.session_id != old
    assert response.applied == 1
    before = effects(house)
    ack = await rollout.submit(copy(batch), number=1)
    assert ack.applied == 1
    assert effects(house) == before


async def test_a_batch_that_was_lost_with_its_session_applies_in_the_new_one(houses):
    house, _, rollout = await running(houses)
    await rollout.submit(reports_pb2.ReportBatch())
    await lapse(house, rollout)
    assert (await rollout.register()).applied == 1
    assert (await rollout.submit(reports_pb2.ReportBatch(), number=2)).applied == 2


async def test_registering_again_before_the_lapse_moves_the_session_and_keeps_leases_and_numbers(houses):
    house, _, rollout = await running(houses)
    groups = (await rollout.lease(1)).groups
    await rollout.submit(reports_pb2.ReportBatch())
    old = rollout.session
    assert (await rollout.register()).applied == 1
    new, rollout.session = rollout.session, old
    assert isinstance(await refusal(rollout.submit()), NotRegisteredError)
    rollout.session = new
    ack = await rollout.submit(completed(groups))
    assert not ack.notices
    assert house.core.statistics().groups_ready == 1


async def test_a_call_that_was_cut_off_and_is_sent_again_applies_once(houses):
    house, _, rollout = await running(houses)
    groups = (await rollout.lease(1)).groups
    batch = completed(groups)
    batch.number = 1
    for _ in range(5):
        call = house.stub.SubmitReports(rollout.request(copy(batch)))
        await asyncio.sleep(0)
        call.cancel()
    ack = await rollout.submit(batch, number=1)
    assert ack.applied == 1
    assert not ack.notices
    assert house.core.statistics().groups_ready == 1


async def test_a_gap_says_what_is_expected_and_changes_nothing(houses):
    house, _, rollout = await running(houses)
    await rollout.submit(reports_pb2.ReportBatch())
    groups = (await rollout.lease(1)).groups
    before = effects(house)
    error = await refusal(rollout.submit(completed(groups), number=3))
    assert isinstance(error, SequenceGapError)
    assert (error.expected, error.found) == (2, 3)
    assert effects(house) == before
    assert (await rollout.submit(completed(groups), number=2)).applied == 2


async def test_the_same_number_with_other_content_is_a_conflict(houses):
    house, _, rollout = await running(houses)
    groups = (await rollout.lease(2)).groups
    await rollout.submit(completed(groups[:1]))
    before = effects(house)
    error = await refusal(rollout.submit(completed(groups[1:]), number=1))
    assert isinstance(error, ConflictingRetryError)
    assert error.number == 1
    assert effects(house) == before


async def test_two_incarnations_number_independently(houses):
    house, _, first = await running(houses)
    second = await house.rollout(replica=1)
    for worker in (first, second):
        assert (await worker.submit(reports_pb2.ReportBatch())).applied == 1


async def test_batch_zero_is_malformed(houses):
    _, _, rollout = await running(houses)
    assert isinstance(await refusal(rollout.submit(reports_pb2.ReportBatch(), number=0)), MalformedError)


def out_of_range(groups: Any) -> list[tuple[str, reports_pb2.ReportBatch]]:
    """Good rows, then one row that was never given."""
    found = []
    for name, change in (
        ("group ahead", {"group": 1 << 50}),
        ("group of an earlier execution", {"group": 1}),
        ("lease ahead", {"lease": 99}),
        ("lease 0", {"lease": 0}),
        ("mask outside", {"masks": [1 << 2]}),
        ("mask in another word", {"word": 1}),
        ("mask in the last word", {"word": 2**32 - 1}),
    ):
        word = change.pop("word", 0)
        row = pb.LeasedGroup()
        row.CopyFrom(groups[1])
        for key, value in change.items():
            if key == "masks":
                row.masks[:] = value
            else:
                setattr(row, key, value)
        batch = completed([groups[0], row])
        if word:
            batch.rollouts[0].words[:] = [0, word]
        batch.metrics.add(name="m", value=1)
        found.append((name, batch))
    return found


async def test_a_batch_with_work_that_was_never_given_changes_nothing_and_its_number_is_free(houses):
    house, _, rollout = await running(houses)
    groups = (await rollout.lease(2)).groups
    before = house.snapshot()
    for name, batch in out_of_range(groups):
        error = await refusal(rollout.submit(batch))
        assert isinstance(error, UnknownWorkError), name
        assert house.snapshot() == before, name
    assert (await rollout.submit(completed(groups), number=1)).applied == 1
    assert house.core.statistics().groups_ready == 2


def malformed(groups: Any) -> dict[str, reports_pb2.ReportBatch]:
    found = {}

    def add(name: str, change: Any, batch: Any = None) -> None:
        batch = batch or completed(groups)
        change(batch.rollouts[0])
        batch.metrics.add(name="m", value=1)
        found[name] = batch

    add("outcome unset", lambda rows: rows.ClearField("outcome"))
    add("outcome of the future", lambda rows: setattr(rows, "outcome", 17))
    add("a lease too few", lambda rows: rows.leases.pop())
    add("a mask too few", lambda rows: rows.masks.pop())
    add("a word too few", lambda rows: rows.words.append(0))
    add("a version too few", lambda rows: rows.lowest_versions.pop())
    add("versions in the wrong order", lambda rows: rows.lowest_versions.__setitem__(0, 1))
    add("a reward that is no number", lambda rows: rows.rewards.__setitem__(0, float("nan")))
    add("a reward too few", lambda rows: rows.rewards.pop())
    add("a reward too many", lambda rows: rows.rewards.append(0))
    add("an empty mask", lambda rows: (rows.masks.__setitem__(0, 0), rows.rewards.__delitem__(slice(0, 2))))
    add("a payload too few", lambda rows: rows.payloads.extend([b""] * 3))
    add("payloads and handles", lambda rows: (rows.payloads.extend([b""] * 4), rows.handles.extend([""] * 4)))
    add("a reason for what is completed", lambda rows: setattr(rows, "reason", "why"))
    add("no reason for what is discarded", lambda rows: None, disposed(groups, DISCARDED))
    add("no reason for what failed", lambda rows: None, disposed(groups, FAILED))
    add("rewards for what is returned", lambda rows: rows.rewards.extend([1.0] * 4), disposed(groups, RETURNED))
    return found


async def test_a_malformed_batch_changes_nothing_and_its_number_is_free(houses):
    house, _, rollout = await running(houses)
    groups = (await rollout.lease(2)).groups
    before = house.snapshot()
    for name, batch in malformed(groups).items():
        error = await refusal(rollout.submit(batch))
        assert isinstance(error, MalformedError), f"{name}: {error!r}"
        assert house.snapshot() == before, name
    assert (await rollout.submit(completed(groups), number=1)).applied == 1


async def test_a_batch_of_too_many_completions_is_refused_whole(houses):
    house, _, rollout = await running(houses, max_batch_completions=3)
    groups = (await rollout.lease(2)).groups
    before = house.snapshot()
    error = await refusal(rollout.submit(completed(groups)))
    assert isinstance(error, MessageTooLargeError)
    assert (error.limit, error.found, error.unit) == (3, 4, "completions")
    assert house.snapshot() == before


async def test_what_only_the_other_role_reports_is_not_allowed(houses):
    house, (trainer,), rollout = await running(houses)
    groups = (await rollout.lease(1)).groups
    before = house.snapshot()
    announcement = reports_pb2.ReportBatch(weights=[reports_pb2.WeightAnnouncement(version=0)])
    for worker, batch in ((trainer, completed(groups)), (rollout, announcement)):
        assert isinstance(await refusal(worker.submit(batch)), NotAllowedError)
    assert house.snapshot() == before


# -- acks, confirmations and notices


async def test_an_empty_request_is_a_heartbeat(houses):
    house, (trainer,), rollout = await running(houses, session_ttl_s=5.0)
    numbered = trainer.batches
    for _ in range(5):
        house.pass_time(4)
        assert (await rollout.submit()).applied == 0
        assert (await trainer.submit()).applied == numbered
    assert house.core.workers.of(rollout.session).info.incarnation == rollout.incarnation
    house.pass_time(4)
    assert house.core.lifecycle.phase == "RUNNING"


async def test_refusals_by_row_are_told_until_they_are_confirmed(houses):
    house, _, rollout = await running(houses)
    groups = (await rollout.lease(3)).groups
    await rollout.submit(disposed(groups[:1], RETURNED))
    mixed = completed(groups)
    ack = await rollout.submit(mixed)
    (notice,) = ack.notices
    assert notice.number == 1
    refused = notice.refused
    assert (refused.batch, refused.block, refused.row) == (2, 0, 0)
    assert refused.reason == reports_pb2.REFUSAL_REASON_LEASE_LOST
    assert (refused.group, refused.word, refused.mask) == (groups[0].group, 0, 3)
    assert house.core.statistics().groups_ready == 2
    assert list((await rollout.submit()).notices) == [notice]
    assert list((await rollout.submit(copy(mixed), number=2)).notices) == [notice]
    assert list((await rollout.submit(acked=2)).notices) == [notice]
    await rollout.register()
    assert list((await rollout.submit()).notices) == [notice]
    assert not (await rollout.submit(notices=1)).notices
    await rollout.submit(completed(groups[1:2]))
    assert [n.number for n in (await rollout.submit(notices=1)).notices] == [2]


async def test_each_refusal_by_row_has_its_reason(houses):
    house, (trainer,), rollout = await running(houses)
    groups = (await rollout.lease(4)).groups
    await rollout.submit(completed(groups[:2]))
    train = (await trainer.next(1)).train
    await trainer.complete(1, train)
    await rollout.submit(completed(groups[2:3]))
    half = copy(completed(groups[3:4]))
    half.rollouts[0].masks[:] = [1]
    half.rollouts[0].rewards[:] = [1.0]
    await rollout.submit(half)
    other = await house.rollout(replica=1)
    everything = await rollout.submit(completed(groups))
    found = {n.refused.group: (n.refused.reason, n.refused.mask) for n in everything.notices}
    assert found == {
        groups[0].group: (reports_pb2.REFUSAL_REASON_RETIRED, 3),
        groups[1].group: (reports_pb2.REFUSAL_REASON_RETIRED, 3),
        groups[2].group: (reports_pb2.REFUSAL_REASON_LEASE_LOST, 3),
        groups[3].group: (reports_pb2.REFUSAL_REASON_ALREADY_REPORTED, 1),
    }
    mine = (await other.lease(1)).groups
    stolen = await rollout.submit(completed(mine))
    assert stolen.notices[-1].refused.reason == reports_pb2.REFUSAL_REASON_LEASE_LOST
    await other.end()
    late = await other.submit(completed(mine))
    assert late.notices[-1].refused.reason == reports_pb2.REFUSAL_REASON_ENDED


async def test_a_result_of_a_group_that_was_leased_again_is_lost_and_does_not_mix(houses):
    house, _, first = await running(houses)
    second = await house.rollout(replica=1)
    (old,) = (await first.lease(1)).groups
    await first.submit(disposed([old], RETURNED))
    (new,) = (await second.lease(1)).groups
    assert new.group == old.group
    assert new.lease > old.lease
    for lease in (old, new):
        ack = await first.submit(completed([lease]))
        assert ack.notices[-1].refused.reason == reports_pb2.REFUSAL_REASON_LEASE_LOST
    assert house.core.statistics().groups_leased == 1
    assert not (await second.submit(completed([new]))).notices


async def test_a_late_result_of_ones_own_earlier_lease_is_lost_too(houses):
    house, _, rollout = await running(houses)
    (old,) = (await rollout.lease(1)).groups
    await rollout.submit(disposed([old], RETURNED))
    (new,) = (await rollout.lease(1)).groups
    assert (new.group, new.lease > old.lease) == (old.group, True)
    late = await rollout.submit(completed([old]))
    assert late.notices[-1].refused.reason == reports_pb2.REFUSAL_REASON_LEASE_LOST
    assert house.core.statistics().groups_ready == 0
    assert not (await rollout.submit(completed([new]), notices=1)).notices


async def test_the_window_of_unacknowledged_batches_is_bounded_and_moves(houses):
    house, _, rollout = await running(houses, max_unacknowledged_batches=2)
    for _ in range(2):
        await rollout.submit(reports_pb2.ReportBatch())
    before = house.snapshot()
    error = await refusal(rollout.submit(reports_pb2.ReportBatch()))
    assert isinstance(error, WindowFullError)
    assert house.snapshot() == before
    assert (await rollout.submit(reports_pb2.ReportBatch(), acked=1)).applied == 3


async def test_what_is_confirmed_is_forgotten_and_still_applies_once(houses):
    house, _, rollout = await running(houses)
    groups = (await rollout.lease(2)).groups
    await rollout.submit(completed(groups[:1]))
    await rollout.submit(acked=1)
    log = house.core.workers.of(rollout.session).log
    assert not log._digests
    before = effects(house)
    for batch in (completed(groups[:1]), completed(groups[1:])):
        assert (await rollout.submit(batch, number=1)).applied == 1
    assert effects(house) == before


@pytest.mark.parametrize(("acked", "notices"), [(2, 0), (0, 1), (2**64 - 1, 0), (0, 2**64 - 1)])
async def test_a_confirmation_of_what_was_never_sent_is_malformed(houses, acked, notices):
    house, _, rollout = await running(houses)
    await rollout.submit(reports_pb2.ReportBatch())
    before = house.snapshot()
    assert isinstance(await refusal(rollout.submit(acked=acked, notices=notices)), MalformedError)
    assert house.snapshot() == before


async def test_a_stream_and_single_calls_are_one_sequence(houses):
    house, _, rollout = await running(houses)
    stream = house.stub.StreamReports()
    for number in (1, 2):
        batch = reports_pb2.ReportBatch(number=number)
        await soon(stream.write(pb.StreamReportsRequest(worker=rollout.identity, batch=batch)))
        assert (await soon(stream.read())).ack.applied == number
    assert (await rollout.submit(reports_pb2.ReportBatch(), number=2)).applied == 2
    assert (await rollout.submit(reports_pb2.ReportBatch(), number=3)).applied == 3
    await soon(stream.write(pb.StreamReportsRequest(worker=rollout.identity)))
    assert (await soon(stream.read())).ack.applied == 3
    await soon(stream.done_writing())


async def test_a_refused_batch_ends_the_stream_and_the_next_stream_goes_on_from_the_acknowledged_number(houses):
    house, _, rollout = await running(houses)

    async def send(*numbers: int) -> list[int]:
        stream = house.stub.StreamReports()
        acks = []
        for number in numbers:
            batch = reports_pb2.ReportBatch(number=number)
            await soon(stream.write(pb.StreamReportsRequest(worker=rollout.identity, batch=batch)))
            acks.append((await soon(stream.read())).ack.applied)
        return acks

    assert await send(1, 2) == [1, 2]
    assert isinstance(await refusal(send(4)), SequenceGapError)
    assert await send(2, 3, 4) == [2, 3, 4]
    assert house.core.workers.of(rollout.session).log.applied == 4


async def test_many_sessions_interleave(houses):
    house, _, _ = await running(houses, prompts=60, max_outstanding_groups=60)
    workers = [await house.rollout(replica=replica) for replica in range(1, 7)]

    async def work(worker: Worker) -> None:
        for _ in range(5):
            groups = (await worker.lease(2)).groups
            batch = completed(groups)
            await worker.submit(batch)
            assert not (await worker.submit(copy(batch), number=worker.batches)).notices

    await soon(asyncio.gather(*map(work, workers)))
    state = house.core.statistics()
    assert state.groups_ready == 60
    assert state.groups_leased == state.groups_pending == state.lease_lost == 0


# -- who speaks


async def test_a_retired_incarnation_is_superseded_and_cannot_take_its_place_back(houses):
    house, _, old = await running(houses)
    groups = (await old.lease(1)).groups
    new = await house.rollout()
    assert isinstance(await refusal(old.submit(completed(groups))), NotRegisteredError)
    for _ in range(2):
        assert isinstance(await refusal(old.register()), SupersededError)
    assert (await new.submit()).applied == 0
    again = (await new.lease(1)).groups
    assert again[0].group == groups[0].group


async def test_a_new_trainer_incarnation_after_the_gate_ends_the_execution(houses):
    house, (trainer,), _ = await running(houses)
    fresh = Worker(house, pb.ROLE_TRAINER)
    error = await refusal(fresh.register())
    assert error.reason == "EXECUTION_ENDED"
    assert (await refusal(trainer.submit())).reason == "EXECUTION_ENDED"
    assert house.core.lifecycle.phase == "FAILED"


# -- leases


async def test_the_same_request_for_leases_gets_the_same_answer(houses):
    house, _, rollout = await running(houses)
    first = await rollout.lease(2)
    assert len(first.groups) == 2
    before = effects(house)
    for most in (2, 1, 50):
        again = await rollout.lease(most, number=1)
        assert list(again.groups) == list(first.groups)
    assert effects(house) == before
    await rollout.register()
    assert list((await rollout.lease(2, number=1)).groups) == list(first.groups)
    assert {group.group for group in (await rollout.lease(2)).groups}.isdisjoint(group.group for group in first.groups)


async def test_an_empty_answer_consumes_its_number_too(houses):
    _, _, rollout = await running(houses, max_outstanding_groups=1)
    await rollout.lease(1)
    assert not (await rollout.lease(1, number=2)).groups
    batch = completed((await rollout.lease(1, number=2)).groups)
    assert not batch.rollouts[0].groups
    assert isinstance(await refusal(rollout.lease(1, number=1)), SequenceGapError)
    error = await refusal(rollout.lease(1, number=4))
    assert isinstance(error, SequenceGapError)
    assert error.expected == 3


async def test_a_lost_reply_to_a_long_request_draws_nothing_anew(houses):
    house, _, rollout = await running(houses, ranks=1)
    call = house.stub.LeasePrompts(
        pb.LeasePromptsRequest(worker=rollout.identity, number=1, max_groups=3, wait={"seconds": 5})
    )
    await until(lambda: house.core.workers.of(rollout.session).lease_number == 1)
    call.cancel()
    issued = house.core.ledger.next_token
    again = await rollout.lease(3, number=1)
    assert len(again.groups) == 3
    assert house.core.ledger.next_token == issued


async def test_a_request_for_no_groups_is_malformed_and_a_trainers_is_not_allowed(houses):
    house, (trainer,), rollout = await running(houses)
    before = house.snapshot()
    assert isinstance(await refusal(rollout.lease(0)), MalformedError)
    assert isinstance(await refusal(trainer.lease(1)), NotAllowedError)
    assert house.snapshot() == before


# -- commands


async def test_every_rank_gets_the_same_command_and_gets_it_again(houses):
    house = await houses(ranks=2)
    first, second = await house.trainers()
    rollout = await house.rollout()
    await rollout.submit(completed((await rollout.lease(2)).groups))
    train = (await first.next(1)).train
    # More is ready by the time the second rank asks.
    await rollout.submit(completed((await rollout.lease(4)).groups))
    assert (await second.next(1)).train == train
    before = effects(house)
    assert (await first.next(1)).train == (await second.next(1)).train == train
    assert effects(house) == before
    assert isinstance(await refusal(first.next(2)), NotAllowedError)
    assert isinstance(await refusal(first.next(9)), UnknownWorkError)
    assert isinstance(await refusal(first.next(0)), UnknownWorkError)


async def test_a_step_commits_once_when_every_rank_has_reported(houses):
    house = await houses(ranks=2)
    first, second = await house.trainers()
    rollout = await house.rollout()
    await rollout.submit(completed((await rollout.lease(2)).groups))
    train = (await first.next(1)).train
    report = reports_pb2.ReportBatch(completions=[first.completion(1, train)])
    await first.submit(report)
    assert house.core.commands.steps == 0
    await second.complete(1, train)
    assert house.core.commands.steps == 1
    before = house.core.statistics()
    await first.submit(copy(report), number=2)
    await first.register()
    await first.submit(copy(report), number=2)
    # The same report under a number of its own is the same report.
    await first.submit(copy(report))
    assert house.core.statistics() == before
    assert house.core.statistics().trained_completions == 4
    assert house.core.commands.updates == 1
    assert len([event for event in house.journal if event["event"] == "commit"]) == 1


async def test_another_report_of_the_same_command_is_a_conflict(houses):
    house = await houses(ranks=2)
    first, second = await house.trainers()
    rollout = await house.rollout()
    await rollout.submit(completed((await rollout.lease(2)).groups))
    train = (await first.next(1)).train
    await second.complete(1, train, updates=2)
    before = house.snapshot()
    assert isinstance(await refusal(second.complete(1, train, updates=3)), ConflictingRetryError)
    assert house.snapshot() == before


async def test_unequal_updates_end_the_execution_for_everyone(houses):
    house = await houses(ranks=2)
    first, second = await house.trainers()
    rollout = await house.rollout()
    await rollout.submit(completed((await rollout.lease(2)).groups))
    train = (await first.next(1)).train
    await second.complete(1, train, updates=2)
    assert isinstance(await refusal(first.complete(1, train, updates=1)), WrongStepError)
    for worker in (first, second, rollout):
        assert isinstance(await refusal(worker.submit()), WrongStepError)
    assert house.core.commands.steps == 0
    assert house.core.statistics().trained_completions == 0


async def test_before_the_gate_no_command_is_given(houses):
    house = await houses(ranks=2)
    first, second = await house.trainers(confirm=False)
    await first.confirm()
    error = await refusal(first.next(1))
    assert isinstance(error, AwaitingAgreementError)
    assert error.missing == ("trainer policy/1",)
    await second.confirm()
    assert (await first.next(1)).WhichOneof("command") is None


# -- payloads, shards, confirmations, stops


async def test_payloads_may_be_fetched_again_until_the_step_commits_and_every_share_is_whole(houses):
    house = await houses(ranks=2, groups_per_step=3, prompt_bytes=10)
    workers = [Worker(house, pb.ROLE_TRAINER, rank=rank, world=2, dp_rank=rank, dp_size=2) for rank in range(2)]
    for worker in workers:
        await worker.register()
        await worker.confirm()
    await workers[0].announce(0)
    rollout = await house.rollout()
    groups = (await rollout.lease(3)).groups
    payloads = [f"payload-{n}".encode() for n in range(6)]
    await rollout.submit(completed(groups, payloads=payloads, payload_codec="raw"))
    train = (await workers[0].next(1)).train

    async def fetch(worker: Worker, **share: int) -> list[Any]:
        request = pb.FetchPayloadsRequest(worker=worker.identity, command=1, **share)
        return [
            g for response in [r async for r in house.stub.FetchPayloads(request, timeout=10)] for g in response.groups
        ]

    shares = [await fetch(worker) for worker in workers]
    assert shares[0] == await fetch(workers[0]) == await fetch(workers[1], dp_rank=0)
    assert [[g.group for g in share] for share in shares] == [
        [g for g, rank in zip(train.groups, train.dp_ranks, strict=True) if rank == share] for share in (0, 1)
    ]
    assert sorted(c.inline for share in shares for g in share for c in g.completions) == payloads
    assert isinstance(await refusal(fetch(workers[0], dp_rank=2)), UnknownWorkError)
    for worker in workers:
        await worker.complete(1, train)
    assert isinstance(await refusal(fetch(workers[0])), NotAllowedError)


async def saving(houses, **options: Any) -> tuple[House, list[Worker], pb.SaveCommand]:
    house = await houses(save_every_steps=1, **options)
    trainers = await house.trainers()
    rollout = await house.rollout()
    await house.train_one(trainers, rollout, 1)
    return house, trainers, (await trainers[0].next(2)).save


async def test_shards_reported_again_after_the_commit_get_the_same_answer(houses):
    house, (first, second), save = await saving(houses)
    pending = await first.saved(2, save)
    assert pending.state == pb.SAVE_STATE_PENDING
    assert await first.saved(2, save) == pending
    done = await second.saved(2, save)
    assert done.state == pb.SAVE_STATE_COMMITTED
    assert done.manifest_digest.startswith("sha256:")
    before = house.snapshot()
    for worker in (first, second):
        again = await worker.saved(2, save)
        assert (again.state, again.manifest_digest) == (done.state, done.manifest_digest)
    assert house.snapshot() == before
    assert len(list(house.run.rglob("manifest.json"))) == 1


async def test_the_last_rank_twice_at_once_publishes_once(houses):
    house, (first, second), save = await saving(houses)
    await first.saved(2, save)
    answers = await asyncio.gather(*(second.saved(2, save) for _ in range(4)))
    assert {answer.state for answer in answers} == {pb.SAVE_STATE_COMMITTED}
    assert len([event for event in house.journal if event["event"] == "published"]) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "other.pt"}, "ARTIFACT_MISSING"),
        ({"completed_training_steps": 9}, "ARTIFACT_FOREIGN"),
        ({"completed_optimizer_updates": 9}, "ARTIFACT_FOREIGN"),
        ({"rank": 1}, "ARTIFACT_FOREIGN"),
        ({"execution_id": "other"}, "ARTIFACT_FOREIGN"),
        ({"checkpoint_id": "other"}, "ARTIFACT_FOREIGN"),
        ({"size_bytes": 0}, "MALFORMED"),
    ],
    ids=str,
)
async def test_receipts_of_something_else_are_refused_and_nothing_of_them_stays(houses, change, reason):
    house, (first, _), save = await saving(houses)
    request = first.shards(2, save, **change)
    before = house.snapshot()
    assert (await refusal(house.stub.ReportShards(request))).reason == reason
    assert house.snapshot() == before


async def test_other_receipts_after_the_first_are_a_conflict(houses):
    house, (first, _), save = await saving(houses)
    await first.saved(2, save)
    before = house.snapshot()
    error = await refusal(house.stub.ReportShards(first.shards(2, save, size_bytes=99)))
    assert isinstance(error, ConflictingRetryError)
    assert house.snapshot() == before


async def test_an_abandoned_save_stays_abandoned_and_nothing_is_published(houses):
    house, (first, second), save = await saving(houses)
    request = pb.ReportShardsRequest(worker=first.identity, command=2)
    request.abandoned.reason = "disk full"
    for _ in range(2):
        assert (await soon(house.stub.ReportShards(request))).state == pb.SAVE_STATE_ABANDONED
    for worker in (first, second):
        assert (await worker.saved(2, save)).state == pb.SAVE_STATE_ABANDONED
    assert not list(house.run.rglob("manifest.json"))
    assert house.core.lifecycle.phase == "RUNNING"


async def test_a_report_without_an_outcome_is_malformed(houses):
    house, (first, _), _ = await saving(houses)
    request = pb.ReportShardsRequest(worker=first.identity, command=2)
    assert isinstance(await refusal(house.stub.ReportShards(request)), MalformedError)


async def test_a_commit_of_the_applications_own_is_not_allowed_where_the_manifest_is_ours(houses):
    house, (first, _), _ = await saving(houses)
    request = pb.ReportShardsRequest(worker=first.identity, command=2)
    request.committed.checkpoint_path = "somewhere"
    assert isinstance(await refusal(house.stub.ReportShards(request)), NotAllowedError)
    assert house.core.statistics().last_save is None


async def test_shards_of_what_is_no_save_are_unknown(houses):
    house, (first, _), save = await saving(houses)
    for command in (0, 1, 3):
        request = first.shards(2, save)
        request.command = command
        assert isinstance(await refusal(house.stub.ReportShards(request)), UnknownWorkError)


async def test_a_confirmation_sent_again_is_the_same_and_another_one_is_a_conflict(houses):
    house = await houses(ranks=2)
    first, second = await house.trainers(confirm=False)
    assert list((await first.confirm()).missing) == ["trainer policy/1"]
    before = effects(house)
    assert list((await first.confirm()).missing) == ["trainer policy/1"]
    assert effects(house) == before
    assert isinstance(await refusal(first.confirm(artifact_names=["other.pt"])), ConflictingRetryError)
    assert (await second.confirm()).agreed
    before = effects(house)
    for worker in (first, second):
        assert (await worker.confirm()).agreed
    assert effects(house) == before


async def test_two_ranks_cannot_write_one_artifact(houses):
    house = await houses(ranks=2)
    first, second = await house.trainers(confirm=False)
    await first.confirm()
    before = house.snapshot()
    for names in (["policy-0.pt"], ["a.pt", "a.pt"]):
        assert isinstance(await refusal(second.confirm(artifact_names=names)), MalformedError)
        assert house.snapshot() == before


async def test_the_first_reason_to_stop_wins(houses):
    house, _, _ = await running(houses)
    identity = pb.WorkerIdentity(execution_id=house.core.identity.id)
    for reason in ("first", "second"):
        response = await soon(house.stub.RequestStop(pb.RequestStopRequest(worker=identity, reason=reason)))
        assert response.reason == "first"
    assert response.phase in (pb.PHASE_DRAINING, pb.PHASE_ENDED)


async def test_a_restarted_execution_resumes_and_asks_its_ranks_for_that_very_checkpoint(houses):
    house, trainers, _ = await saving(houses)
    await house.save(trainers, 2)
    second = await houses()
    state = await soon(second.stub.GetResumeState(pb.GetResumeStateRequest()))
    assert state.execution_number == 2
    assert state.metadata.completed_training_steps == 1
    assert state.manifest_digest
    (rank, _) = await second.trainers(confirm=False)
    mismatch = await refusal(rank.confirm(manifest_digest="sha256:" + "0" * 64))
    assert isinstance(mismatch, ResumeMetadataMismatch)
    assert mismatch.changed == ("manifest_digest",)
    assert second.core.lifecycle.phase == "FAILED"
