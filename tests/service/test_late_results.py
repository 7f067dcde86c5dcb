"""G6: what comes late, twice at once, or from a former life is refused by itself and mixes into nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from service_harness import House, Worker, completed, deep, disposed, refusal, soon

from cosmos_ctrl.core.errors import MalformedError, NotRegisteredError, SupersededError
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2

LEASE_LOST = reports_pb2.REFUSAL_REASON_LEASE_LOST
ENDED = reports_pb2.REFUSAL_REASON_ENDED


async def running(houses: Any, **options: Any) -> tuple[House, Worker, Worker]:
    house = await houses(**{"ranks": 1} | options)
    (trainer,) = await house.trainers()
    return house, trainer, await house.rollout()


def copy(batch: reports_pb2.ReportBatch) -> reports_pb2.ReportBatch:
    return reports_pb2.ReportBatch.FromString(batch.SerializeToString())


async def lapse(house: House, worker: Worker, *others: Worker) -> None:
    """The worker falls silent for long enough, and the others do not."""
    for _ in range(3):
        house.pass_time(6)
        for other in others:
            await other.submit()
    assert isinstance(await refusal(worker.submit()), NotRegisteredError)


def refusals(ack: reports_pb2.ReportAck) -> list[tuple[int, int, int]]:
    """(group, reason, mask) of each refused row."""
    return [(n.refused.group, n.refused.reason, n.refused.mask) for n in ack.notices if n.HasField("refused")]


async def fetch(house: House, trainer: Worker, number: int) -> dict[int, list[tuple[float, bytes]]]:
    found: dict[int, list[tuple[float, bytes]]] = {}
    async for response in house.stub.FetchPayloads(pb.FetchPayloadsRequest(worker=trainer.identity, command=number)):
        for group in response.groups:
            found.setdefault(group.group, []).extend((c.reward, c.inline) for c in group.completions)
    return found


def marked(group: pb.LeasedGroup, mark: float, **versions: int) -> reports_pb2.ReportBatch:
    """A batch whose rewards and payloads say whose it is."""
    batch = completed([group], payloads=[b"%d" % mark] * 2, payload_codec="raw", **versions)
    batch.rollouts[0].rewards[:] = [mark] * 2
    return batch


# -- a lease's former life


@pytest.mark.parametrize("how", ["returned", "failed", "lapsed", "overdue", "replaced", "payload lost", "stale"])
async def test_a_late_result_of_a_lease_that_ended_in_any_way_is_lost_and_never_mixes(houses, how):
    options: dict[str, Any] = {"lease_deadline_s": 100.0, "session_ttl_s": 15.0, "groups_per_step": 1}
    if how == "stale":
        options |= {"max_staleness": 0, "on_stale": "regenerate"}
    house, trainer, first = await running(houses, **options)
    second = await house.rollout(replica=1)
    version, number = 0, 1
    (old,) = (await first.lease(1)).groups
    if how == "returned":
        await first.submit(disposed([old], reports_pb2.OUTCOME_RETURNED))
    elif how == "failed":
        await first.submit(disposed([old], reports_pb2.OUTCOME_FAILED, "oom"))
    elif how == "lapsed":
        await lapse(house, first, second, trainer)
        await first.register()
    elif how == "overdue":
        for _ in range(12):
            house.pass_time(9)
            for worker in (first, second, trainer):
                await worker.submit()
        (cancelled,) = (await first.submit()).notices
        assert list(cancelled.cancelled.leases) == [old.lease]
    elif how == "replaced":
        first = await house.rollout()
    elif how == "payload lost":
        await first.submit(marked(old, 1))
        train = (await trainer.next(1)).train
        report = reports_pb2.CompletionReport(command=1, completed_training_step=1)
        report.rows.add(disposition=reports_pb2.DISPOSITION_PAYLOAD_LOST, groups=train.groups, masks=train.masks)
        await trainer.submit(reports_pb2.ReportBatch(completions=[report]))
        await trainer.announce(1)
        version, number = 1, 2
    else:
        (other,) = (await second.lease(1)).groups
        await second.submit(marked(other, 9))
        await first.submit(marked(old, 1))
        train = (await trainer.next(1)).train
        assert list(train.groups) == [other.group]
        await trainer.complete(1, train)
        await trainer.announce(1)
        assert (await trainer.next(2)).WhichOneof("command") is None
        version, number = 1, 2
    (new,) = (await second.lease(1)).groups
    assert (new.group, new.lease > old.lease, list(new.masks)) == (old.group, True, [3])
    lost = house.core.statistics().lease_lost
    late = await first.submit(marked(old, 1))
    assert refusals(late)[-1] == (old.group, LEASE_LOST, 3)
    # Nor does it help to name the new lease: it is somebody else's.
    stolen = await first.submit(marked(new, 1))
    assert refusals(stolen)[-1] == (old.group, LEASE_LOST, 3)
    assert house.core.statistics().lease_lost == lost + 2
    assert not refusals(await second.submit(marked(new, 2, version=version)))
    train = (await trainer.next(number)).train
    assert list(train.groups) == [new.group]
    assert await fetch(house, trainer, number) == {new.group: [(2.0, b"2")] * 2}
    # Too late for this life as well.
    assert refusals(await first.submit(marked(old, 1)))[-1][:2] == (old.group, LEASE_LOST)
    await trainer.complete(number, train)
    retired = (await first.submit(marked(old, 1))).notices[-1].refused
    assert retired.reason == reports_pb2.REFUSAL_REASON_RETIRED


# -- one batch twice at once


async def test_a_batch_that_comes_on_two_streams_at_once_applies_once_and_both_hear_the_same(houses):
    house, _, rollout = await running(houses, max_outstanding_groups=64, prompts=64)
    groups = (await rollout.lease(40)).groups
    await rollout.submit(disposed(groups[:1], reports_pb2.OUTCOME_RETURNED))
    batches = []
    for number, group in enumerate(groups, start=2):
        batches.append(completed([group]))
        batches[-1].number = number
    streams = [house.stub.StreamReports() for _ in range(3)]

    async def write(stream: Any) -> None:
        for batch in batches:
            await soon(stream.write(pb.StreamReportsRequest(worker=rollout.identity, batch=copy(batch))))

    async def read(stream: Any) -> list[reports_pb2.ReportAck]:
        return [(await soon(stream.read())).ack for _ in batches]

    *_, acks = await asyncio.gather(*map(write, streams[1:]), write(streams[0]), asyncio.gather(*map(read, streams)))
    for heard in acks:
        applied = [ack.applied for ack in heard]
        assert applied == sorted(applied)
        assert all(ack >= batch.number for ack, batch in zip(applied, batches, strict=True))
        assert applied[-1] == batches[-1].number
        assert {tuple(refusals(ack)) for ack in heard} == {((groups[0].group, LEASE_LOST, 3),)}
    state = house.core.statistics()
    assert (state.groups_ready, state.lease_lost) == (39, 1)


async def test_an_old_streams_messages_that_arrive_after_the_new_streams_change_nothing(houses):
    house, _, rollout = await running(houses)
    groups = (await rollout.lease(3)).groups
    old, new = house.stub.StreamReports(), house.stub.StreamReports()
    batches = []
    for number, group in enumerate(groups, start=1):
        batches.append(completed([group]))
        batches[-1].number = number

    async def send(stream: Any, number: int, acked: int) -> int:
        request = pb.StreamReportsRequest(worker=rollout.identity, acked_through=acked, batch=copy(batches[number - 1]))
        await soon(stream.write(request))
        return (await soon(stream.read())).ack.applied

    assert await send(old, 1, 0) == 1
    assert await send(new, 1, 0) == 1
    assert await send(new, 2, 1) == 2
    assert await send(new, 3, 2) == 3
    before = deep(house.core.rollouts), deep(house.core.ledger), house.core.statistics()
    for number in (1, 2):
        assert await send(old, number, 0) == 3
    assert (deep(house.core.rollouts), deep(house.core.ledger), house.core.statistics()) == before


# -- what is told until it is confirmed


async def test_refusals_frees_and_cancels_are_told_in_every_session_until_each_is_confirmed(houses):
    house, trainer, rollout = await running(houses, lease_deadline_s=50.0, groups_per_step=1)
    groups = (await rollout.lease(3)).groups
    await rollout.submit(completed(groups[:1], handles=["a", "b"]))
    train = (await trainer.next(1)).train
    report = reports_pb2.CompletionReport(command=1, completed_training_step=1)
    report.rows.add(disposition=reports_pb2.DISPOSITION_DISCARDED, reason="r", groups=train.groups, masks=train.masks)
    await trainer.submit(reports_pb2.ReportBatch(completions=[report]))
    await rollout.submit(completed(groups[:1]))
    for _ in range(6):
        house.pass_time(9)
        await rollout.submit()
        await trainer.submit()
    ack = await rollout.submit()
    kinds = [notice.WhichOneof("kind") for notice in ack.notices]
    assert sorted(kinds) == ["cancelled", "cancelled", "freed", "refused"]
    assert [notice.number for notice in ack.notices] == [1, 2, 3, 4]
    await lapse(house, rollout, trainer)
    for _ in range(2):
        await rollout.register()
        assert list((await rollout.submit()).notices) == list(ack.notices)
    assert list((await rollout.submit(acked=2, notices=2)).notices) == list(ack.notices)[2:]
    # A confirmation is of what was told; an older one takes nothing back.
    assert list((await rollout.submit(notices=1)).notices) == list(ack.notices)[2:]
    assert not (await rollout.submit(notices=4)).notices


# -- who speaks


async def test_a_process_that_wakes_after_it_was_replaced_changes_nothing_with_anything_it_says(houses):
    house, _, old = await running(houses)
    groups = (await old.lease(2)).groups
    stream = house.stub.StreamReports()
    await soon(stream.write(pb.StreamReportsRequest(worker=old.identity)))
    await soon(stream.read())
    new = await house.rollout()
    mine = (await new.lease(2)).groups
    before = deep(house.core.rollouts), deep(house.core.ledger), deep(house.core.workers), house.core.statistics()
    batch = completed(groups)
    batch.number = 1
    await soon(stream.write(pb.StreamReportsRequest(worker=old.identity, batch=batch)))
    assert isinstance(await refusal(stream.read()), NotRegisteredError)
    assert isinstance(await refusal(old.lease(1, number=1)), NotRegisteredError)
    for _ in range(2):
        assert isinstance(await refusal(old.register()), SupersededError)
    after = deep(house.core.rollouts), deep(house.core.ledger), deep(house.core.workers), house.core.statistics()
    assert after == before
    assert not (await new.submit(completed(mine))).notices


# -- ends


async def test_a_replica_ends_with_its_last_rank_and_neither_duplicates_nor_strangers_end_it(houses):
    house, _, first = await running(houses)
    await first.end()
    ranks = [await house.rollout(replica=7, rank=rank, world=2) for rank in range(2)]
    neighbour = await house.rollout(replica=8)
    held = [(await rank.lease(1)).groups[0] for rank in ranks]
    other = (await neighbour.lease(1)).groups[0]
    stranger = Worker(house, pb.ROLE_ROLLOUT, replica=7, rank=2, world=2)
    before = house.snapshot()
    assert isinstance(await refusal(stranger.register()), MalformedError)
    assert house.snapshot() == before
    for _ in range(3):
        await ranks[0].end()
    # Its own lease is over with its end; the replica is not.
    assert refusals(await ranks[0].submit(completed([held[0]])))[-1][1] == LEASE_LOST
    assert not refusals(await ranks[1].submit(completed([held[1]])))
    again = (await ranks[1].lease(1)).groups[0]
    await ranks[1].end()
    lost = house.core.statistics().lease_lost
    for rank, group in zip(ranks, (held[0], again), strict=True):
        ack = await rank.submit(completed([group], handles=["a", "b"]))
        assert refusals(ack)[-1] == (group.group, ENDED, 3)
    assert house.core.statistics().lease_lost == lost
    assert house.core.statistics().groups_ready == 1
    assert not refusals(await neighbour.submit(completed([other])))


# -- counts


async def test_discards_count_once_however_they_come_and_never_below_zero(houses):
    house, _, rollout = await running(houses, n_generation=4)
    groups = (await rollout.lease(2)).groups
    batch = disposed(groups[:1], reports_pb2.OUTCOME_DISCARDED, "too_long")
    batch.rollouts[0].masks[:] = [0b0011]
    overlapping = copy(batch)
    overlapping.rollouts[0].masks[:] = [0b0110]
    count = lambda: house.core.statistics().discarded_completions  # noqa: E731
    await rollout.submit(batch)
    assert count() == 2
    await rollout.submit(copy(batch), number=1)
    assert count() == 2
    ack = await rollout.submit(copy(batch))
    assert (count(), refusals(ack)[-1][2]) == (2, 0b0011)
    ack = await rollout.submit(overlapping)
    assert (count(), refusals(ack)[-1][2]) == (3, 0b0010)
    rows = copy(overlapping).rollouts[0]
    rows.masks[:] = [0b1000]
    both = reports_pb2.ReportBatch(rollouts=[rows, rows])
    ack = await rollout.submit(both)
    assert count() == 4
    assert refusals(ack)[-1][:2] == (groups[0].group, reports_pb2.REFUSAL_REASON_RETIRED)
    for late in (batch, completed(groups[:1])):
        await rollout.submit(copy(late))
        assert count() == 4
    boundary = house.core.ledger.snapshot().remaining_completions
    assert boundary == 16 * 4 - 4


async def test_who_leaves_a_line_of_waiting_workers_is_told_and_the_others_wait_on(houses):
    """Wherever it stands: its session lapsed, it was replaced, or it has ended."""
    house, trainer, busy = await running(houses, max_outstanding_groups=1)
    (held,) = (await busy.lease(1)).groups
    workers = [await house.rollout(replica=replica) for replica in range(1, 7)]
    first, lapses, replaced, ends, _, last = workers
    calls = []
    for worker in workers:
        request = pb.LeasePromptsRequest(worker=worker.identity, number=1, max_groups=1, wait={"seconds": 50})
        calls.append(asyncio.ensure_future(worker.stub.LeasePrompts(request)))
        await house.until_waiting(len(calls))
    await ends.end()
    assert (await soon(calls[3])).no_more
    await house.rollout(replica=replaced.place["replica"])
    assert isinstance(await refusal(calls[2]), NotRegisteredError)
    await lapse(house, lapses, *(worker for worker in (trainer, busy, *workers) if worker not in (lapses, replaced)))
    assert isinstance(await refusal(calls[1]), NotRegisteredError)
    waiting = [calls[0], calls[4], calls[5]]
    assert not any(call.done() for call in waiting)
    # First come, first served.
    for worker, call in ((first, calls[0]), (workers[4], calls[4]), (last, calls[5])):
        await busy.submit(disposed([held], reports_pb2.OUTCOME_RETURNED))
        (group,) = (await soon(call)).groups
        busy, held = worker, group
    assert not house.waiting
