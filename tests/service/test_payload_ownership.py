"""Whose a payload is: the controller's once accepted, the trainer's once given out, the producer's again when it is told to free it.

Each test writes down who owns each handle after every event; the producer hears of exactly those that are its own again.
"""

from __future__ import annotations

from typing import Any

import pytest
from service_harness import House, Worker, completed, disposed, refusal, soon

from cosmos_ctrl.core.errors import ControlError
from cosmos_ctrl.service import messages as messages_module
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2

TRAINED, DISCARDED, RETURNED, LOST = (
    reports_pb2.DISPOSITION_TRAINED,
    reports_pb2.DISPOSITION_DISCARDED,
    reports_pb2.DISPOSITION_RETURNED,
    reports_pb2.DISPOSITION_PAYLOAD_LOST,
)


async def running(houses: Any, **options: Any) -> tuple[House, Worker, Worker]:
    house = await houses(**{"ranks": 1} | options)
    (trainer,) = await house.trainers()
    return house, trainer, await house.rollout()


def handles(groups: Any, size: int = 2) -> list[str]:
    return [f"{group.group}/{group.lease}/{index}" for group in groups for index in range(size)]


async def owned_again(worker: Worker) -> tuple[dict[int, int], dict[int, int]]:
    """(freed, refused) by group, as masks: everything that the producer was told and has not confirmed."""
    freed: dict[int, int] = {}
    refused: dict[int, int] = {}
    for notice in (await worker.submit()).notices:
        if notice.HasField("freed"):
            for group, mask in zip(notice.freed.groups, notice.freed.masks, strict=True):
                assert not freed.get(group, 0) & mask, "told twice"
                freed[group] = freed.get(group, 0) | mask
        elif notice.HasField("refused"):
            refused[notice.refused.group] = refused.get(notice.refused.group, 0) | notice.refused.mask
    return freed, refused


async def complete_as(trainer: Worker, train: pb.TrainCommand, rows: list[tuple[int, int, int]]) -> None:
    """Command 1 is complete; `rows` are (disposition, group, mask)."""
    report = reports_pb2.CompletionReport(command=1, completed_training_step=train.step, optimizer_updates=1)
    for disposition, group, mask in rows:
        reason = "rejected" if disposition == DISCARDED else ""
        report.rows.add(disposition=disposition, reason=reason, groups=[group], masks=[mask])
    await trainer.submit(reports_pb2.ReportBatch(completions=[report]))


async def test_what_is_accepted_and_given_out_is_not_the_producers(houses):
    _, trainer, rollout = await running(houses)
    groups = (await rollout.lease(3)).groups
    await rollout.submit(completed(groups, handles=handles(groups)))
    assert await owned_again(rollout) == ({}, {})
    assert (await trainer.next(1)).train.step == 1
    assert await owned_again(rollout) == ({}, {})


async def test_each_disposition_leaves_a_payload_where_it_belongs(houses):
    house, trainer, rollout = await running(houses, groups_per_step=4)
    groups = (await rollout.lease(4)).groups
    await rollout.submit(completed(groups, handles=handles(groups)))
    train = (await trainer.next(1)).train
    kinds = dict(zip((TRAINED, DISCARDED, RETURNED, LOST), train.groups, strict=True))
    await complete_as(trainer, train, [(kind, group, 3) for kind, group in kinds.items()])
    assert await owned_again(rollout) == ({kinds[DISCARDED]: 3, kinds[LOST]: 3}, {})
    state = house.core.statistics()
    assert (state.trained_completions, state.discarded_completions) == (2, 2)
    assert (state.groups_ready, state.groups_pending) == (1, 1)


async def test_a_part_of_a_group_is_freed_and_the_rest_is_not(houses):
    _, trainer, rollout = await running(houses, n_generation=4, groups_per_step=1)
    groups = (await rollout.lease(1)).groups
    await rollout.submit(completed(groups, handles=handles(groups, 4)))
    train = (await trainer.next(1)).train
    (group,) = train.groups
    await complete_as(trainer, train, [(TRAINED, group, 0b0101), (DISCARDED, group, 0b1000), (LOST, group, 0b0010)])
    assert await owned_again(rollout) == ({group: 0b1010}, {})


@pytest.mark.parametrize("on_stale", ["discard", "regenerate"])
async def test_a_group_too_old_goes_back_to_its_producer_and_is_dropped_or_generated_again(houses, on_stale):
    house, trainer, rollout = await running(houses, max_staleness=0, on_stale=on_stale)
    groups = (await rollout.lease(3)).groups
    await rollout.submit(completed(groups, handles=handles(groups)))
    train = (await trainer.next(1)).train
    await trainer.complete(1, train)
    (old,) = {group.group for group in groups} - set(train.groups)
    await trainer.next(2)
    assert await owned_again(rollout) == ({old: 3}, {})
    state = house.core.statistics()
    assert (state.discarded_completions, state.groups_pending) == ((2, 0) if on_stale == "discard" else (0, 1))
    await trainer.announce(1)
    again = (await rollout.lease(1)).groups[0]
    assert (again.group == old) == (on_stale == "regenerate")


async def test_a_group_below_the_minimum_goes_back_whole(houses):
    house, _, rollout = await running(houses, n_generation=3, min_completions_per_group=2)
    (group,) = (await rollout.lease(1)).groups
    part = completed([group], handles=["a"])
    part.rollouts[0].masks[:], part.rollouts[0].rewards[:] = [0b010], [1.0]
    await rollout.submit(part)
    assert await owned_again(rollout) == ({}, {})
    rest = disposed([group], reports_pb2.OUTCOME_DISCARDED, "too_long")
    rest.rollouts[0].masks[:] = [0b101]
    await rollout.submit(rest)
    assert await owned_again(rollout) == ({group.group: 0b010}, {})
    state = house.core.statistics()
    assert (state.discarded_completions, state.groups_ready) == (3, 0)


async def test_a_refused_row_and_a_refused_batch_never_change_hands(houses):
    house, _, rollout = await running(houses)
    groups = (await rollout.lease(2)).groups
    await rollout.submit(disposed(groups[:1], reports_pb2.OUTCOME_RETURNED))
    for change in (lambda rows: rows.leases.__setitem__(0, 99), lambda rows: rows.rewards.pop()):
        batch = completed(groups, handles=handles(groups))
        change(batch.rollouts[0])
        error = await refusal(rollout.submit(batch))
        assert isinstance(error, ControlError)
    assert await owned_again(rollout) == ({}, {})
    assert rollout.batches == 1, "a refused batch took a number"
    assert house.core.statistics().groups_ready == 0
    await rollout.submit(completed(groups, handles=handles(groups)))
    # Its own to free by the refusal alone: it is not told a second time.
    assert await owned_again(rollout) == ({}, {groups[0].group: 3})


async def test_payloads_of_a_process_that_was_replaced_are_the_controllers_until_they_are_done(houses):
    house, trainer, old = await running(houses)
    groups = (await old.lease(2)).groups
    await old.submit(completed(groups, handles=handles(groups)))
    new = await house.rollout()
    train = (await trainer.next(1)).train
    fetched = [r async for r in house.stub.FetchPayloads(pb.FetchPayloadsRequest(worker=trainer.identity, command=1))]
    assert [c.handle for r in fetched for g in r.groups for c in g.completions] == handles(groups)
    await complete_as(trainer, train, [(DISCARDED, group, 3) for group in train.groups])
    # It is not the new process's to free, and the old one is gone.
    assert await owned_again(new) == ({}, {})


async def test_a_trainer_that_reads_no_payloads_holds_nothing_but_its_own_stream_up(houses, monkeypatch):
    house, trainer, rollout = await running(houses, groups_per_step=8, max_outstanding_groups=8)
    made = 0
    make = messages_module.payload_parts

    def counted(*arguments: Any) -> Any:
        nonlocal made
        for chunk in make(*arguments):
            made += 1
            yield chunk

    monkeypatch.setattr(messages_module, "payload_parts", counted)
    monkeypatch.setattr("cosmos_ctrl.service.servicer.PAYLOAD_CHUNK_BYTES", 1 << 18)
    groups = (await rollout.lease(8)).groups
    for group in groups:
        payloads = [bytes(1 << 20)] * 2
        await rollout.submit(completed([group], payloads=payloads, payload_codec="raw"))
    assert (await trainer.next(1)).train.step == 1
    call = house.stub.FetchPayloads(pb.FetchPayloadsRequest(worker=trainer.identity, command=1))
    await soon(call.read())
    for _ in range(50):
        assert (await rollout.submit()).applied == 8
    assert made < 16, "all of it was made although nobody reads"
    received = 1
    while await soon(call.read()):
        received += 1
        if received == made == 16:
            break
    assert made == 16
